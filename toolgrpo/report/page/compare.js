// Compare: the same questions in two sets of episodes: before and after, two steps, or two runs.

function setsToCompare() {
  const found = [];
  REPORT.runs.forEach((run, number) => {
    const prefix = REPORT.runs.length > 1 ? `${run.name}: ` : "";
    for (const chunk of run.chunks.filter((one) => one.mode !== "train")) found.push([`c${chunk.texts}`, prefix + placeName(chunk, false), number]);
    const steps = run.chunks.filter((one) => one.mode === "train").map((one) => one.step);
    if (!steps.length) return;
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const middle = Math.floor((first + last) / 2);
    found.push([`r${number}.${first}.${last}`, `${prefix}all training steps`, number]);
    if (last > first) {
      found.push([`r${number}.${first}.${middle}`, `${prefix}training, first half`, number]);
      found.push([`r${number}.${middle + 1}.${last}`, `${prefix}training, second half`, number]);
      for (const step of [...new Set(steps)]) found.push([`r${number}.${step}.${step}`, `${prefix}step ${shownStep(step)}`, number]);
    }
  });
  return found;
}

function membersOf(name) {
  const inRange = name.startsWith("r");
  const [run, first, last] = inRange ? name.slice(1).split(".").map(Number) : [];
  const questions = new Map();
  for (let row = 0; row < REPORT.n; row++) {
    const at = atOf(row);
    const inside = inRange ? at.mode === "train" && at.run === run && at.step >= first && at.step <= last : `c${at.texts}` === name;
    if (!inside) continue;
    const q = REPORT.rows.q[row];
    if (!questions.has(q)) questions.set(q, []);
    questions.get(q).push(row);
  }
  return questions;
}

// The first choice: before and after (greedy), else the halves, else the runs.
function firstPair(sets) {
  const named = (end, run = 0) => sets.find(([, name, number]) => number === run && name.endsWith(end));
  const pairs = [
    REPORT.runs.length > 1 ? [0, 1].map((run) => named("after (greedy)", run) || named("all training steps", run)) : [],
    [named("before (greedy)"), named("after (greedy)")],
    [named("first half"), named("second half")],
    [sets[0], sets[1] || sets[0]],
  ];
  return pairs.find((pair) => pair[0] && pair[1]) || [];
}

async function compareView(wanted) {
  const sets = setsToCompare();
  if (sets.length < 2) return [h("h1", {}, "Compare"), h("p.empty", {}, "There is only one set of episodes here. Give two folders (toolgrpo report A B), or a run of more steps.")];
  const [a, b] = firstPair(sets);
  const [left, right] = [wanted.a || a[0], wanted.b || b[0]];
  const set = (changes) => go("compare", { ...wanted, ...changes }, { replace: true });
  const [before, after] = [membersOf(left), membersOf(right)];
  const pairs = [...before.keys()].filter((q) => after.has(q)).map((q) => ({ q, before: before.get(q), after: after.get(q), from: successOf(before.get(q)), to: successOf(after.get(q)) })).filter((pair) => pair.from !== null && pair.to !== null);
  const kinds = {
    up: pairs.filter((pair) => pair.from < 0.5 && pair.to >= 0.5),
    down: pairs.filter((pair) => pair.from >= 0.5 && pair.to < 0.5),
    same: pairs.filter((pair) => pair.from >= 0.5 === pair.to >= 0.5),
  };
  const shown = kinds[wanted.kind] || (wanted.kind === "all" ? pairs : kinds.up.length ? kinds.up : pairs);
  const kind = wanted.kind || (kinds.up.length ? "up" : "all");
  const columns = [
    { name: "question", value: (pair) => REPORT.prompts[pair.q][1], show: (pair) => h("a.question", { href: link("compare", { ...wanted, a: left, b: right, q: REPORT.prompts[pair.q][0] }) }, REPORT.prompts[pair.q][1]) },
    { name: "A", number: true, value: (pair) => pair.from, show: (pair) => outcome(pair.before) },
    { name: "B", number: true, value: (pair) => pair.to, show: (pair) => outcome(pair.after) },
    { name: "change", number: true, value: (pair) => pair.to - pair.from, show: (pair) => h(pair.to > pair.from ? "span.good" : pair.to < pair.from ? "span.bad" : "span.quiet", {}, pair.to === pair.from ? "same" : signed(pair.to - pair.from)) },
  ];
  const chosen = pairs.find((pair) => REPORT.prompts[pair.q][0] === wanted.q);
  return [
    h("h1", {}, "Compare"),
    h("p.quiet", {}, `The same questions in two sets of episodes${inPart(REPORT.runs)}.`),
    h("div.bar", {}, choice("A", left, sets, (value) => set({ a: value, q: "" })), choice("B", right, sets, (value) => set({ b: value, q: "" }))),
    h("div.toggle", { role: "group", "aria-label": "Which questions" }, [["up", `flipped to success (${kinds.up.length})`], ["down", `flipped to failure (${kinds.down.length})`], ["same", `no flip (${kinds.same.length})`], ["all", `all (${pairs.length})`]].map(([name, text]) => h("button", { type: "button", "aria-pressed": String(kind === name), onclick: () => set({ kind: name, q: "" }) }, text))),
    chosen ? await sideBySide(chosen, sets, left, right) : null,
    pairs.length ? table(columns, shown, { sort: wanted.sort || "change", down: wanted.down !== "0", onsort: (sort, down) => set({ sort, down: down ? 1 : 0 }), href: (pair) => link("compare", { ...wanted, a: left, b: right, q: REPORT.prompts[pair.q][0] }), empty: "No question did that." }) : h("p.empty", {}, "No question is in both sets."),
  ];
}

const outcome = (rows) => {
  const scored = rows.filter((row) => REPORT.rows.ok[row] !== null);
  const ok = scored.filter((row) => REPORT.rows.ok[row]).length;
  return scored.length === 1 ? (ok ? "success" : "no success") : `${ok}/${scored.length}`;
};

async function sideBySide(pair, sets, left, right) {
  const typical = (rows, share) => rows.find((row) => REPORT.rows.ok[row] === (share >= 0.5 ? 1 : 0)) ?? rows[0];
  const rows = [typical(pair.before, pair.from), typical(pair.after, pair.to)];
  const [one, other] = await Promise.all(rows.map(episodeOf));
  const name = (key) => (sets.find(([id]) => id === key) || ["", ""])[1];
  const differs = one.turns.findIndex((turn, place) => !other.turns[place] || turnKey(turn) !== turnKey(other.turns[place]));
  return h("section.pair", {},
    h("h2", {}, REPORT.prompts[pair.q][1]),
    h("p.quiet", {}, differs < 0 ? "Both did the same." : `They diverge in turn ${differs + 1}.`, one.columns.answer === undefined ? null : [" Answer of the row: ", h("code", {}, short(contentText(one.columns.answer)))]),
    h("div.side.two", {}, [[one, left, rows[0]], [other, right, rows[1]]].map(([episode, key, row]) => h("article.episode", {}, h("header", {}, h("b", {}, name(key)), " ", h("a", { href: episodeLink(row) }, `episode ${episode.n}, reward ${num(episode.r)}`), h("div", {}, badges(row))), conversation(episode, { prompt: false })))));
}
