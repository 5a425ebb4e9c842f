// Overview: what the run came to, how it went there, and what to look at.

const STOP_COLOURS = { finished: 2, stop_tool: 1, length: 3, context_full: 4, max_turns: 5, max_user_turns: 5, deadline: 6, engine_failure: 7 };
const PHASES = { before_rollout: "before the rollout", rollout: "rollout", scoring: "rewards and scoring", training: "training" };

function overview(wanted) {
  const run = REPORT.runs[Number(wanted.run || 0)] || REPORT.runs[0];
  const sums = run.sums.filter((one) => one.mode === "train");
  return [
    runChoice(wanted, "overview"),
    heading(run),
    h("div.cards", {}, cards(run, sums)),
    findingsInShort(run),
    h("div.charts", {}, charts(run, sums)),
    toolTable(run, run.sums),
    measuredTable(run),
    settings(run),
  ];
}

function runChoice(wanted, path, first = []) {
  if (REPORT.runs.length < 2) return null;
  return h("div.bar", {}, choice("Run", wanted.run ?? (first.length ? "" : 0), [...first, ...REPORT.runs.map((run, number) => [number, run.name])], (value) => go(path, { ...wanted, run: value })));
}

function heading(run) {
  const facts = run.facts || {};
  const model = facts.model ? facts.model.split("/").at(-1) : null;
  const said = [model && `model ${model}`, facts.tools && facts.tools.length && plural(facts.tools.length, "tool"), plural(run.recorded, "recorded episode") + (inPart([run]) && `, ${run.shown.toLocaleString("en-US")} of them in lists, Find and Compare`), facts.versions && `toolgrpo ${facts.versions.toolgrpo}, TRL ${facts.versions.trl}`];
  return h("div.title", {}, h("h1", {}, run.name), h("p.quiet", {}, said.filter(Boolean).join(" · ")));
}

function cards(run, sums) {
  const found = [];
  for (const kind of ["greedy", "sampled"]) {
    const [before, after] = ["before", "after"].map((when) => run.measured.findLast((one) => one.label === `${when} (${kind})`));
    if (before || after) found.push(beforeAfter(kind, before, after));
  }
  if (sums.length) {
    const tenth = Math.max(1, Math.round(sums.length / 10));
    const mean = (part, value) => {
      const given = part.map(value).filter((one) => one !== null);
      return given.length ? given.reduce((sum, one) => sum + one, 0) / given.length : null;
    };
    const [first, last] = [sums.slice(0, tenth), sums.slice(-tenth)];
    const over = tenth > 1 ? `first and last ${tenth} steps` : "first and last step";
    found.push(change("reward", mean(first, (one) => one.r), mean(last, (one) => one.r), over, num));
    found.push(change("success in training", mean(first, successful), mean(last, successful), over, percent));
  }
  const measured = sums.length ? [] : run.sums.filter((one) => one.mode === "eval" && one.scored); // an evaluation without a training
  for (const one of measured) found.push(h("div.card", {}, h("h3", {}, "success"), h("p.big", {}, percent(successful(one))), h("p.quiet", {}, `95 %: ${stepInterval(one).map(percent).join(" to ")}, ${plural(one.scored, "episode")}`)));
  if (measured.length) return found;
  const times = run.steps.map((one) => one.metrics.step_time).filter((value) => value > 0);
  const all = times.reduce((sum, value) => sum + value, 0);
  found.push(h("div.card", {}, h("h3", {}, "steps"), h("p.big", {}, String(largest([...run.steps, ...sums].map((one) => one.step + 1), 0)), run.facts.max_steps ? h("small", {}, ` of ${run.facts.max_steps}`) : null), h("p.quiet", {}, times.length ? `${seconds(all / times.length)} each` : plural(run.recorded, "episode"))));
  return found;
}

const successful = (sums) => (sums.scored ? sums.ok / sums.scored : null); // an episode that could not be scored is no failure

function change(name, before, after, over, show) {
  return h("div.card", {}, h("h3", {}, name), h("p.big", {}, h("span.from", {}, show(before)), h("span.arrow", {}, " → "), h("span", {}, show(after))), h("p.quiet", {}, over));
}

function beforeAfter(kind, before, after) {
  const part = (one) => (one ? percent(one.successes / one.n) : "–");
  const range = (one) => (one ? measuredInterval(one).map((value) => Math.round(value * 100)).join("–") : null);
  const one = after || before;
  return h("div.card.main", {}, h("h3", {}, `held-out success, ${kind}`),
    h("p.big", {}, h("span.from", {}, part(before)), h("span.arrow", {}, " → "), h("span", {}, part(after))),
    bars([before, after]),
    h("p.quiet", {}, `95 %: ${range(before) || "–"} → ${range(after) || "–"} %, ${plural(one.questions ?? one.n, "question")}`));
}

// By questions: the episodes of one are alike.
function measuredInterval(one) {
  const asked = one.questions ?? one.n;
  return interval((one.successes / one.n) * asked, asked);
}

function stepInterval(one) {
  return measuredInterval({ successes: one.ok, n: one.scored, questions: one.groups?.reduce((sum, n) => sum + n, 0) });
}

// Two bars with their intervals, one under the other.
function bars(pair) {
  const drawing = svg("svg.bars", { viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" });
  pair.forEach((one, number) => {
    if (!one) return;
    const [low, high] = measuredInterval(one);
    const y = number * 7 + 1;
    drawing.append(svg("rect.back", { x: 0, y, width: 100, height: 5 }));
    drawing.append(svg(number ? "rect.now" : "rect.then", { x: 0, y, width: (100 * one.successes) / one.n, height: 5 }));
    drawing.append(svg("rect.interval", { x: 100 * low, y: y + 2, width: 100 * (high - low), height: 1 }));
  });
  return drawing;
}

function findingsInShort(run) {
  if (!run.findings.length) return null;
  return h("section.findings", { "aria-label": "Findings" },
    run.findings.slice(0, 3).map((one) => h("p.finding", {}, h("span.badge.warn", {}, one.rule.replaceAll("_", " ")), " ", one.sentence)),
    h("a", { href: link("findings", { run: run.number || null }) }, run.findings.length > 3 ? `All ${run.findings.length} findings, with examples` : "Examples and what to do"));
}

function charts(run, sums) {
  const events = run.events.map((event) => ({ x: shownStep(event.step), what: event.what, text: event.text })).filter((event) => event.what !== "finished");
  const points = (value) => sums.map((one) => [shownStep(one.step), value(one)]);
  const metric = (name, scale = 1) => run.steps.map((one) => [shownStep(one.step), typeof one.metrics[name] === "number" ? one.metrics[name] * scale : null]);
  const names = (key) => [...new Set(sums.flatMap((one) => Object.keys(one[key] || {})))].sort();
  const parts = names("parts");
  const stops = names("stops");
  const causes = names("causes");
  const counts = (name) => sums.reduce((sum, one) => sum + (one.tools[name] ? one.tools[name].n : 0), 0);
  const tools = names("tools").sort((a, b) => counts(b) - counts(a));
  const others = tools.slice(6);
  const measured = run.sums.filter((one) => one.mode === "eval" && one.scored);
  const setOf = (one) => (one.label || "").split(" on ").slice(1).join(" on "); // of several to evaluate on
  const made = [
    chart({ title: "Reward", hint: "mean of a step, 95 % interval", events, series: [
      { name: "reward", points: sums.filter((one) => one.r !== null).map((one) => [shownStep(one.step), one.r, ...(one.sd === null ? [] : [-1.96, 1.96].map((z) => one.r + (z * one.sd) / Math.sqrt(one.rewarded)))]) },
      ...(parts.length > 1 ? parts.map((name) => ({ name, points: points((one) => one.parts[name] ?? null) })) : []),
    ] }),
    chart({ title: "Success", hint: "share of a step's episodes, 95 % interval", range: [0, 1], show: percent, events, series: [
      { name: "in training", colour: 2, points: sums.filter((one) => one.scored).map((one) => [shownStep(one.step), successful(one), ...stepInterval(one)]) },
      ...[...new Set(measured.map(setOf))].map((set, at) => ({ name: set ? `held out, ${set}` : "held out", colour: [1, 3, 4, 5, 6, 7][at % 6], points: measured.filter((one) => setOf(one) === set).map((one) => [one.step, successful(one), ...stepInterval(one)]) })),
    ] }),
    chart({ title: "Groups", hint: "dead ones teach nothing", stacked: true, whole: true, events, show: (value) => String(Math.round(value)), series: [
      { name: "live", colour: 2, points: points((one) => (one.groups ? one.groups[0] : null)) },
      { name: "dead, failed", colour: 3, points: points((one) => (one.groups ? one.groups[1] : null)) },
      { name: "dead, solved", colour: 1, points: points((one) => (one.groups ? one.groups[2] : null)) },
      { name: "dead, both", colour: 7, points: points((one) => (one.groups ? one.groups[3] || null : null)) },
      { name: "dead, dropped", colour: 6, points: points((one) => one.dropped_groups || null) },
    ] }),
    chart({ title: "Why episodes ended", stacked: true, events, show: percent, range: [0, 1], series: stops.map((name) => ({ name: name.replaceAll("_", " "), colour: STOP_COLOURS[name], points: points((one) => (one.stops[name] || 0) / one.n) })) }),
    chart({ title: "Calls by tool", hint: "calls per episode", stacked: true, events, series: [
      ...tools.slice(0, 6).map((name) => ({ name: named(name), points: points((one) => (one.tools[name] ? one.tools[name].n / one.n : 0)) })),
      ...(others.length ? [{ name: plural(others.length, "other"), colour: 7, points: points((one) => others.reduce((sum, name) => sum + (one.tools[name] ? one.tools[name].n : 0), 0) / one.n) }] : []),
    ] }),
    chart({ title: "Failed calls by cause", hint: "calls of a step", stacked: true, whole: true, events, show: (value) => num(value), series: causes.map((name) => ({ name: name.replaceAll("_", " "), points: points((one) => one.causes[name] || 0) })) }),
    chart({ title: "Tool latency", hint: "95th percentile", events, show: seconds, series: tools.slice(0, 6).map((name) => ({ name: named(name), points: points((one) => (one.tools[name] ? one.tools[name].p95 : null)) })) }),
    chart({ title: "Length", hint: "sampled tokens per episode", events, series: [{ name: "tokens", points: points((one) => one.tokens) }] }),
    chart({ title: "Turns", hint: "per episode", events, series: [{ name: "turns", colour: 4, points: points((one) => one.turns) }] }),
    chart({ title: "Entropy", hint: "nats per token", events, series: [{ name: "entropy", colour: 5, points: metric("entropy") }] }),
    chart({ title: "KL to the reference", events, series: [{ name: "KL", colour: 3, points: metric("kl") }] }),
    chart({ title: "Engine against trainer", hint: "difference of log-probabilities", events, series: [
      { name: "mean", points: metric("sampling/sampling_logp_difference/mean") },
      { name: "largest", colour: 3, points: metric("sampling/sampling_logp_difference/max") },
    ] }),
    chart({ title: "Gradient norm", events, series: [{ name: "norm", colour: 6, points: metric("grad_norm") }] }),
    chart({ title: "Time of a step", hint: "by phase", stacked: true, events, show: seconds, series: Object.entries(PHASES).map(([key, name]) => ({ name, points: run.steps.map((one) => [shownStep(one.step), one.phases && one.phases[key] !== undefined ? one.phases[key] : null]) })) }),
  ];
  return made.filter(Boolean);
}

function toolTable(run, sums) {
  const found = new Map();
  for (const one of sums) {
    for (const [name, calls] of Object.entries(one.tools)) {
      const tool = found.get(name) || { name, n: 0, failed: {}, p95: 0 };
      tool.n += calls.n;
      for (const [cause, count] of Object.entries(calls.failed)) tool.failed[cause] = (tool.failed[cause] || 0) + count;
      tool.p95 = Math.max(tool.p95, calls.p95);
      found.set(name, tool);
    }
  }
  if (!found.size) return null;
  // Find knows as many names as it has bits for; others have no link.
  const to = (tool, more, kind, text) => (REPORT.tools.includes(tool.name) && (!more.cause || REPORT.causes.includes(more.cause))
    ? h(kind, { href: link("find", { tool: tool.name, run: REPORT.runs.length > 1 ? run.number : null, ...more }) }, text)
    : h(kind.replace(/^a/, "span"), {}, text));
  const failures = (tool) => Object.values(tool.failed).reduce((sum, count) => sum + count, 0);
  const ordered = [...found.values()].sort((a, b) => failures(b) - failures(a) || b.n - a.n);
  const columns = [
    { name: "tool", value: (tool) => tool.name, show: (tool) => to(tool, {}, "a", named(tool.name)) },
    { name: "calls", number: true, value: (tool) => tool.n, show: (tool) => tool.n.toLocaleString("en-US") },
    { name: "failed", number: true, value: failures, show: (tool) => (failures(tool) ? `${failures(tool).toLocaleString("en-US")} (${percent(failures(tool) / tool.n)})` : "0") },
    { name: "why", value: () => 0, show: (tool) => Object.entries(tool.failed).sort((a, b) => b[1] - a[1]).map(([cause, count]) => to(tool, { cause }, "a.badge.warn", `${cause.replaceAll("_", " ")} ${count}`)) },
    { name: "median", number: true, value: (tool) => run.medians[tool.name], show: (tool) => seconds(run.medians[tool.name]) },
    { name: "slowest p95", number: true, value: (tool) => tool.p95, show: (tool) => seconds(tool.p95) },
  ];
  return h("section", {}, h("h2", {}, "Tools"), h("p.quiet", {}, "Most failures first. A cause leads to its episodes."), table(columns, ordered));
}

function measuredTable(run) {
  if (!run.measured.length) return null;
  const columns = [
    { name: "held-out rows", value: (one) => one.label || "", show: (one) => one.label || "–" },
    { name: "questions", number: true, value: (one) => one.questions ?? one.n },
    { name: "success", number: true, value: (one) => one.successes / one.n, show: (one) => percent(one.successes / one.n) },
    { name: "95 % interval", number: true, value: () => 0, show: (one) => measuredInterval(one).map(percent).join(" to ") },
    { name: "reward", number: true, value: (one) => one.reward, show: (one) => num(one.reward) },
  ];
  const both = ["before", "after"].every((when) => run.chunks.some((one) => one.mode === "heldout" && (one.label || "").startsWith(when)));
  return h("section", {}, h("h2", {}, "Before and after"), table(columns, run.measured), both ? h("p", {}, h("a", { href: link("compare") }, "Which questions flipped")) : null);
}

function settings(run) {
  const config = (run.facts && run.facts.config) || {};
  if (!Object.keys(config).length) return null;
  return h("details.settings", {}, h("summary", {}, "Settings of this run"), lines(Object.entries(config).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])), h("p.quiet", {}, Object.entries(run.facts.versions || {}).map(([name, version]) => `${name} ${version}`).join(" · ")));
}
