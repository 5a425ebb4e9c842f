"""The cases of TRL's `tests/test_grpo_trainer.py` by name, and what becomes of each here.

`run NAME`, `test NAME` and `refused NAME` are those of `test_trl_cases.py`; else why the case is TRL's alone.
"""

CASES: dict[str, str] = {
    **{f"test_compute_entropy_{name}": "TRL's: a function that runs as it is" for name in ("mask_0", "mask_1")},
    **{
        f"test_compute_entropy_{name}": "TRL's: a function that runs as it is"
        for name in ("threshold_0", "threshold_1")
    },
    "test_compute_entropy_mask_lower_threshold": "TRL's: a function that runs as it is",
    "test_compute_entropy_all_masked": "TRL's: a function that runs as it is",
    "test_generate_prefers_rollout_func": "refused rollout_func",
    "test_generate_rollout_func_syncs_vllm_weights_when_needed": "refused rollout_func",
    "test_generate_rollout_func_raises_when_required_keys_are_missing": "refused rollout_func",
    "test_init_minimal": "test text_with_a_reward_model",
    "test_train": "test text_with_a_reward_model",
    "test_train[tiny-NemotronHForCausalLM-nano]": "TRL's: a recurrent state, for which the engine without vLLM names "
    "those with it; tests/engines/test_transformers_engine.py has the sentence",
    "test_train_dataset_format[standard]": "test text_with_a_reward_model",
    "test_train_dataset_format[conversational]": "test conversations_with_a_reward_model",
    **{
        f"test_init_with_eval_dataset[{form}]": "test evaluation_rows_may_have_any_form"
        for form in ("dataset", "iterable_dataset", "dataset_dict", "iterable_dataset_dict")
    },
    "test_init_with_eval_dataset[dict_of_dataset]": "test evaluation_rows_may_have_any_form",
    "test_init_with_eval_dataset[dict_of_iterable_dataset]": "test evaluation_rows_may_have_any_form",
    "test_init_with_eval_dataset[none]": "test rewards_get_text_prompts_columns_and_messages",
    "test_iterable_dataset_requires_dispatch_batches_false": "test rows_that_stream",
    "test_iterable_dataset_forces_num_workers_zero": "test rows_that_stream",
    "test_iterable_eval_keeps_map_style_train_workers": "test rows_that_stream",
    "test_train_peft_config": "run peft",
    "test_train_peft_model": "run peft",
    "test_train_moe_peft_model": "run peft",
    "test_train_peft_with_gradient_checkpointing": "run peft_checkpointing",
    "test_train_with_cast_lm_head_to_fp32": "run cast_lm_head",
    **{f"test_entropy_bonus_scale[{name}]": "run vespo" for name in ("grpo", "dr_grpo", "dapo")},
    "test_entropy_bonus_scale[luspo]": "run cast_lm_head",
    "test_entropy_bonus_flows_gradients": "TRL's: its trainer fails it in 1.16, too",
    "test_train_with_adaptive_entropy_gradient_accumulation": "run adaptive",
    "test_train_with_mask_truncated_completions_all_masked": "TRL's: its loss, which runs as it is",
    "test_warning_raised_all_rewards_none": "test rewards_that_are_all_none_end_the_run",
    **{
        f"test_warning_raised_sequence_level_with_token_summed_loss[{name}]": "TRL's: a warning, which it gives as it is"
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
    },
    "test_prepare_input_called_with_correct_data": "test the_rows_of_the_data_are_left_as_they_are",
    "test_dataset_required_without_environment": "test no_rows_are_refused",
    "test_mismatched_reward_processing_classes_length": "test text_with_a_reward_model",
    "test_correct_reward_processing_classes_list": "test text_with_a_reward_model",
    "test_single_reward_model_with_single_processing_class": "test conversations_with_a_reward_model",
    **{
        f"test_{name}": "TRL's: it wants liger-kernel"
        for name in (
            *("liger_kernel_with_peft_lm_head_raises", "liger_kernel_with_peft_non_lm_head_target_allowed"),
            *("liger_kernel_with_peft_modules_to_save_lm_head_allowed", "train_with_off_policy_mask_with_liger"),
            *("liger_kernel_with_peft_prompt_learning_raises", "compute_liger_loss_passes_vllm_is_ratio"),
        )
    },
    **{
        f"test_train_vllm_{name}": "TRL's: it is skipped there"
        for name in ("and_peft", "importance_sampling_correction", "with_additional_generation_kwargs")
    },
    **{
        f"test_{name}": "TRL's: a function of Transformers"
        for name in (
            *("generation_output_has_logprobs_field", "generation_output_logprobs_accepts_floats"),
            *("continuous_batching_config_has_return_logprobs", "generate_batch_accepts_continuous_batching_config"),
        )
    },
    "test_trust_remote_code": "TRL's: loading a model, which runs as it is",
    **{f"test_train_loss_types[{name}]": f"run {name}" for name in ("bnpo", "dr_grpo", "dapo", "cispo", "sapo")},
    **{f"test_train_loss_types[{name}]": f"run {name}" for name in ("luspo", "vespo")},
    **{f"test_train_{name}": "run eval" for name in ("with_eval", "with_num_generations_eval", "eval_on_start")},
    "test_evaluate_with_eval_dataset": "run eval",
    "test_train_with_iterable_dataset": "test rows_that_stream",
    "test_train_multiple_iterations": "run cispo",
    "test_train_different_reward_model": "test conversations_with_a_reward_model",
    "test_train_reward_func_standard": "test rewards_get_text_prompts_columns_and_messages",
    "test_train_reward_func_conversational": "test conversations_with_a_reward_model",
    "test_train_multiple_reward_funcs": "test none_of_one_reward_leaves_the_others",
    "test_train_sync_and_async_reward_funcs": "test none_of_one_reward_leaves_the_others",
    "test_train_multiple_reward_funcs_with_None_output": "test none_of_one_reward_leaves_the_others",
    "test_train_multiple_reward_funcs_with_weights": "test none_of_one_reward_leaves_the_others",
    "test_reward_metric_reflects_reward_weights": "test none_of_one_reward_leaves_the_others",
    "test_train_multiple_mixed_reward_funcs": "test text_with_a_reward_model",
    "test_train_reward_func_additional_column": "test rewards_get_text_prompts_columns_and_messages",
    "test_train_with_sync_ref_model": "run sapo",
    "test_train_beta_non_zero": "run sapo",
    "test_train_with_pad_to_multiple_of": "run dr_grpo",
    "test_get_off_policy_mask": "TRL's: a function that runs as it is",
    "test_get_off_policy_mask_padding": "TRL's: a function that runs as it is",
    "test_train_with_off_policy_mask": "run grpo",
    "test_train_with_bias_correction_kl": "run kl",
    "test_train_with_static_entropy": "run vespo",
    "test_train_with_adaptive_entropy": "run adaptive",
    "test_train_with_entropy_filter": "run dapo",
    "test_train_vllm_structured_outputs": "refused structured outputs",
    "test_train_with_additional_generation_kwargs": "run sampling",
    "test_train_normalize_then_sum_aggregation": "run kl",
    **{f"test_train_scale_rewards[{name}]": f"run {run}" for name, run in (("False", "dr_grpo"), ("group", "dapo"))},
    "test_train_scale_rewards[batch]": "run bnpo",
    "test_train_with_mask_truncated_completions": "TRL's: it replaces model.generate, which is refused; run bnpo has the setting",
    "test_train_num_generations_larger_than_batch_size": "run grpo",
    "test_train_delta_clipping": "run grpo",
    "test_train_multiple_dataloader_workers": "run adaptive",
    "test_train_with_generation_kwargs": "refused num_beams",
    "test_train_with_reward_func_accessing_trainer_state": "test rewards_get_text_prompts_columns_and_messages",
    "test_train_reward_func_with_log_extra": "test rewards_get_text_prompts_columns_and_messages",
    "test_train_reward_func_with_log_metric": "test rewards_get_text_prompts_columns_and_messages",
    "test_train_sequence_importance_sampling": "run luspo",
    "test_train_with_chat_template_kwargs": "test template_arguments_reach_the_template",
    "test_train_with_tools": "TRL's: it replaces model.generate, which is refused; tests/trainer/test_trainer.py has ours",
    "test_train_with_malformed_tool_calls": "TRL's: it replaces model.generate, which is refused; tests/rollout has ours",
    "test_train_with_environment_factory": "TRL's: it replaces model.generate, which is refused; "
    "test an_environment_factory_is_an_environment has ours",
    "test_train_with_environment_owned_reward": "TRL's: it replaces model.generate, which is refused; "
    "test an_environment_factory_is_an_environment has ours",
    "test_environment_owned_reward_coexists_with_reward_funcs": "TRL's: it reads trainer.tools, which names trainer.toolbox; "
    "test an_environment_factory_is_an_environment has ours",
    "test_train_with_environment_owned_data": "refused a method",
    "test_environment_owned_data_requires_max_steps": "refused a method",
    "test_train_with_multiple_environments": "refused several environments",
    "test_train_with_unknown_environment_raises": "refused an unknown environment",
    "test_environment_owned_reward_mixed_environments": "refused several environments",
    "test_multiple_environments_without_dataset_raises": "refused several environments",
    "test_no_reward_source_raises": "test no_reward_is_refused",
    "test_train_with_transformers_continuous_batching": "refused continuous batching",
    **{f"test_train_scale_rewards[{name}]": f"run {run}" for name, run in (("True", "dapo"), ("none", "dr_grpo"))},
    **{
        f"test_train_vlm{name}": "refused images"
        for name in ("", "_with_pad_to_multiple_of", "_beta_non_zero", "_peft")
    },
    **{f"test_train_vlm{name}": "refused images" for name in ("_and_importance_sampling", "_and_vllm", "_multi_image")},
    "test_train_vlm_log_multimodal_false": "refused multimodal logs",
    "test_train_with_tools_multimodal_response": "TRL's: a model that sees, and model.generate replaced",
    **{
        f"test_{name}": "TRL's: it wants liger-kernel"
        for name in (
            *("train_vlm_and_liger", "train_with_liger_grpo_kernel", "train_with_liger_grpo_kernel_and_peft"),
            "liger_grpo_kernel_importance_sampling",
        )
    },
    **{
        f"test_{name}": "TRL's: it wants a GPU"
        for name in ("vlm_training", "vlm_processor_vllm_colocate_mode", "train_vllm")
    },
}
