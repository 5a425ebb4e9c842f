// One episode, as a conversation or as tokens.

async function episodeView(parts, wanted) {
  const row = rowAt(parts[0], parts[1]);
  if (row === null) return [h("h1", {}, "There is no such episode here"), h("p", {}, h("a", { href: link("find") }, "All episodes"))];
  const episode = await episodeOf(row);
  const group = REPORT.groupOf[row];
  const path = `episode/${parts[0]}/${parts[1]}`;
  const set = (changes) => go(path, { ...wanted, ...changes }, { replace: true });
  const view = wanted.view === "tokens" ? "tokens" : "chat";
  const number = group.rows.indexOf(row);
  const [before, after] = [group.rows[number - 1] ?? row - 1, group.rows[number + 1] ?? row + 1];
  return [
    h("nav.crumbs", { "aria-label": "Where this is" },
      h("a", { href: link("groups", { step: episode.at.mode === "train" ? shownStep(episode.at.step) : null }) }, placeName(episode.at)), " / ",
      group.rows.length > 1 ? [h("a", { href: groupLink(group) }, `group of ${group.rows.length}`), " / "] : null, `episode ${episode.n}`,
      h("span.step", {}, before >= 0 ? h("a", { href: episodeLink(before, wanted), "data-key": "k" }, "← previous") : null, after < REPORT.n ? h("a", { href: episodeLink(after, wanted), "data-key": "j" }, "next →") : null)),
    h("h1", {}, short(previewOf(row), 160) || `Episode ${episode.n}`),
    h("div.headline", {},
      h("div", {}, h("p.big", {}, num(episode.r), h("small", {}, " reward")), h("p", {}, badges(row)), h("p.quiet", {}, facts(episode))),
      rewardParts(episode)),
    h("div.toggle", { role: "group", "aria-label": "View" }, ["chat", "tokens"].map((name) => h("button", { type: "button", "aria-pressed": String(view === name), onclick: () => set({ view: name }) }, name === "chat" ? "Conversation" : "Tokens"))),
    view === "tokens" ? await tokenView(episode, wanted, set) : conversation(episode),
    h("details.row", {}, h("summary", {}, "Row of the data, and where the time went"), lines(Object.entries(episode.columns).map(([name, value]) => [name, long(contentText(value))])), timeOf(episode)),
  ];
}

function facts(episode) {
  return [
    episode.a === undefined ? null : `advantage ${signed(episode.a)}`,
    `ended: ${String(episode.stop).replaceAll("_", " ")}`,
    plural(episode.turns.length, "turn"),
    `${plural(episode.gen, "sampled token")} of ${episode.len}`,
    seconds(episode.d),
    episode.env === undefined ? null : `environment gave ${num(episode.env)}`,
  ].filter(Boolean).join(" · ");
}

function conversation(episode, { prompt = true } = {}) {
  return h("div.chat", {},
    prompt ? episode.prompt.map((message) => bubble(message.role || "?", [long(contentText(message.content)), message.tool_calls ? h("pre", {}, JSON.stringify(message.tool_calls, null, 1)) : null], { folded: message.role === "system" })) : null,
    episode.turns.map((turn, number) => [segmentMarks(episode, number), turnBubbles(turn, number)]),
    (episode.msgs || []).map((message) => bubble(message.role || "?", long(contentText(message.content)))),
    episode.fail ? bubble("failure", long(episode.fail)) : null,
    episode.drop ? bubble("dropped", long(episode.drop)) : null,
    h("p.end", {}, endOf(episode)));
}

const LIMITS = { length: "cut: max_completion_length was used up", context_full: "cut: the context window was used up", max_turns: "ended: no turn was left (max_turns)", max_user_turns: "ended: the user may say no more (max_user_turns)", deadline: "ended by episode_timeout", stop_tool: "ended by a tool", finished: "finished", engine_failure: "lost: the engine failed" };
const endOf = (episode) => LIMITS[episode.stop] || String(episode.stop);

function bubble(role, content, { folded = false } = {}) {
  if (folded) return h(`details.bubble.${roleClass(role)}`, {}, h("summary", {}, role), content);
  return h(`div.bubble.${roleClass(role)}`, {}, h("div.role", {}, role), content);
}

// What stands before a turn that begins another segment: its history was written anew.
function segmentMarks(episode, number) {
  const before = number ? episode.turns[number - 1].en : 0;
  return (episode.seg || []).map(([start], place) => (start >= before && start < episode.turns[number].st ? segmentMark(episode, place) : null));
}

const segmentMark = (episode, place) => h("p.segment", {}, `segment ${place + 2} begins, with a history of ${plural(episode.seg[place][1], "token")}`);

const roleClass = (role) => (["system", "user", "assistant", "tool", "failure", "dropped"].includes(role) ? role : "other");

function turnBubbles(turn, number) {
  const attempts = turn.at || [];
  const results = turn.re || [];
  return [
    h("div.bubble.assistant", {},
      h("div.role", {}, `assistant, turn ${number + 1}`, h("span.quiet", {}, ` ${turn.en - turn.st} tokens, ${seconds(turn.s)}${creditOf(turn)}`)),
      turn.th ? h("details.thinking", { open: turn.th.length < 400 }, h("summary", {}, "thinking"), long(turn.th)) : null,
      turn.c ? long(turn.c) : null,
      attempts.map((attempt) => attemptBox(attempt)),
      !turn.c && !attempts.length && !turn.th ? h("p.quiet", {}, "(nothing was said)") : null,
      turn.cut ? h("p", {}, h("span.badge.warn", {}, "cut before it ended")) : null),
    results.map((result) => resultBox(result)),
    attempts.length > results.length ? h("p.quiet.end", {}, `${plural(attempts.length - results.length, "call")} not answered: the episode ended first`) : null,
    turn.u === undefined ? null : bubble("user", long(turn.u)),
  ];
}

const creditOf = (turn) => `${turn.tr === undefined ? "" : `, turn reward ${signed(turn.tr)}`}${turn.ta === undefined ? "" : `, advantage ${signed(turn.ta)}`}`;

function attemptBox(attempt) {
  const well = !attempt.st;
  return h("div.attempt", {},
    h("div", {}, h("b", {}, attempt.n || "call"), " ", well ? null : h("span.badge.warn", {}, attempt.st.replaceAll("_", " "))),
    attempt.a && typeof attempt.a === "object" && Object.keys(attempt.a).length ? lines(Object.entries(attempt.a).map(([name, value]) => [name, long(typeof value === "string" ? value : JSON.stringify(value), 600)])) : null,
    well || !attempt.raw ? null : long(attempt.raw, 600));
}

function resultBox(result) {
  const marks = [result.e ? h("span.badge.bad", {}, result.e.replaceAll("_", " ")) : null, result.ca ? h("span.badge", {}, "cached") : null, result.lo ? h("span.badge.warn", {}, `${result.lo.toLocaleString("en-US")} characters cut`) : null, result.end ? h("span.badge", {}, "ends the episode") : null];
  return h(`div.bubble.tool${result.e ? ".failed" : ""}`, {}, h("div.role", {}, `tool ${result.n || "?"}`, h("span.quiet", {}, ` ${seconds(result.s)} `), marks), long(result.c));
}

// Text as it was written; what is long is folded.
function long(text, most = 1500) {
  const whole = String(text ?? "");
  if (whole.length <= most && whole.split("\n", 41).length <= 40) return h("pre.text", { dir: "auto" }, whole);
  const start = whole.slice(0, most).split("\n").slice(0, 40).join("\n");
  const box = h("pre.text", { dir: "auto" }, start);
  const button = h("button.more", { type: "button", onclick: () => { fill(box, whole); button.remove(); } }, `Show all ${whole.length.toLocaleString("en-US")} characters`);
  return h("div", {}, box, button);
}

function timeOf(episode) {
  const sums = segmentSums(episode);
  return h("p.quiet", {}, `queued ${seconds(sums.queued)}, decoding ${seconds(sums.decoding)}, tools ${seconds(sums.tool)}, other ${seconds(sums.other)}`);
}

// Where the time of an episode lies, in seconds since its rollout began.
function segmentsOf(episode) {
  const start = episode.qs || 0;
  const found = start ? [{ what: "queued", from: 0, to: start, name: "waiting for a place" }] : [];
  episode.turns.forEach((turn, number) => {
    found.push({ what: "decoding", from: start + turn.t0, to: start + turn.t0 + turn.s, name: `turn ${number + 1}` });
    for (const result of turn.re || []) if (result.s > 0) found.push({ what: "tool", from: start + result.t0, to: start + result.t0 + result.s, name: result.n || "tool" });
  });
  if (episode.stop === "deadline") {
    // What the deadline cut has no end of its own: calls without a result, or else a turn that was being decoded.
    const last = episode.turns.at(-1);
    const from = Math.max(start, ...found.map((one) => one.to));
    const called = last && (last.at || []).length > (last.re || []).length;
    found.push({ what: called ? "tool" : "decoding", from, to: start + (episode.d || 0), name: called ? "tool" : `turn ${episode.turns.length + 1}` });
  }
  return found;
}

function segmentSums(episode) {
  const sums = { queued: episode.qs || 0, decoding: 0, tool: 0 };
  const tools = [];
  for (const segment of segmentsOf(episode)) {
    if (segment.what === "decoding") sums.decoding += segment.to - segment.from;
    if (segment.what === "tool") tools.push([segment.from, segment.to]);
  }
  sums.tool = covered(tools);
  sums.other = Math.max(0, (episode.d || 0) - sums.decoding - sums.tool);
  return sums;
}

// The length of the union of intervals: parallel calls count once.
function covered(intervals) {
  let [sum, end] = [0, -Infinity];
  for (const [from, to] of [...intervals].sort((a, b) => a[0] - b[0])) {
    sum += Math.max(0, to - Math.max(from, end));
    end = Math.max(end, to);
  }
  return sum;
}
