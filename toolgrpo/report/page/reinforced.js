// What is reinforced: a step's tokens and calls by advantage × (1 − p), the push that the gradient
// gives a sampled token, and which tools and turns have how much of it.

async function reinforcedView(wanted) {
  const sets = [...REPORT.chunks.values()].filter((chunk) => chunk.mode === "train");
  if (!sets.length) return [h("h1", {}, "What is reinforced"), h("p.empty", {}, "No training steps were recorded.")];
  const at = sets.find((chunk) => String(chunk.texts) === wanted.at) || sets[0];
  const rows = [];
  for (let row = 0; row < REPORT.n; row++) if (REPORT.rows.chunk[row] === at.texts && REPORT.rows.a[row]) rows.push(row);
  const place = sets.indexOf(at);
  const which = wanted.which || "all";
  const used = rows.filter((row) => which === "all" || REPORT.rows.ok[row] === (which === "wrong" ? 0 : 1));
  const found = await pushes(used);
  return [
    h("h1", {}, "What is reinforced"),
    h("p.quiet", {}, "Push = advantage × (1 − p): how far a step's gradient moves the probability of a sampled token. Up for what did better than its group, down for what did worse; certain tokens hardly move."),
    h("div.bar", {},
      choice("Step", at.texts, sets.map((chunk) => [chunk.texts, placeName(chunk)]), (value) => go("reinforced", { ...wanted, at: value }, { replace: true })),
      choice("Episodes", which, [["all", "all with an advantage"], ["wrong", "without success"], ["right", "successful"]], (value) => go("reinforced", { ...wanted, which: value }, { replace: true })),
      h("span.step", {}, place > 0 ? h("a", { href: link("reinforced", { ...wanted, at: sets[place - 1].texts }), "data-key": "k" }, "← step before") : null, place + 1 < sets.length ? h("a", { href: link("reinforced", { ...wanted, at: sets[place + 1].texts }), "data-key": "j" }, "step after →") : null)),
    h("p.count", {}, `${plural(used.length, "episode")} with an advantage, ${plural(found.n, "sampled token")}`),
    used.length ? h("div.columns", {},
      tokenTable("Pushed up", found.tokens.filter((one) => one.sum > 0).sort((a, b) => b.sum - a.sum)),
      tokenTable("Pushed down", found.tokens.filter((one) => one.sum < 0).sort((a, b) => a.sum - b.sum)),
      callTable("Calls pushed up", found.calls.filter((one) => one.sum > 0).sort((a, b) => b.sum - a.sum)),
      callTable("Calls pushed down", found.calls.filter((one) => one.sum < 0).sort((a, b) => a.sum - b.sum)),
      shareTable("Share of the loss by tool", found.tools, "turns that call it"),
      shareTable("Share of the loss by turn", found.turns, "turn")) : h("p.empty", {}, "No episode of this step has an advantage: all groups are dead."),
  ];
}

async function pushes(rows) {
  const tokens = new Map();
  const calls = new Map();
  const tools = new Map();
  const turns = new Map();
  let n = 0;
  for (const row of rows) {
    const [{ tokens: own }, episode] = await Promise.all([tokensOf(row), episodeOf(row)]);
    const callSums = episode.turns.map(() => 0);
    for (const token of own) {
      if (token.weight === null || token.weight === undefined) continue;
      n += 1;
      const key = shownToken(token);
      const one = tokens.get(key) || { key, sum: 0, n: 0, most: 0, row };
      one.sum += token.weight;
      one.n += 1;
      if (Math.abs(token.weight) > Math.abs(one.most)) Object.assign(one, { most: token.weight, row });
      tokens.set(key, one);
      if (token.turn >= 0) callSums[token.turn] += token.weight;
      const turn = episode.turns[token.turn];
      const size = Math.abs(token.advantage); // each token has its advantage's share of the loss
      const names = turn && turn.at ? [...new Set(turn.at.map((attempt) => attempt.n || "unnamed"))] : ["no call"];
      for (const name of names) tools.set(name, (tools.get(name) || 0) + size / names.length);
      turns.set(token.turn, (turns.get(token.turn) || 0) + size);
    }
    episode.turns.forEach((turn, number) => {
      for (const attempt of turn.at || []) {
        const key = callText(attempt);
        const one = calls.get(key) || { key, sum: 0, n: 0, row };
        one.sum += callSums[number] / turn.at.length;
        one.n += 1;
        calls.set(key, one);
      }
    });
  }
  return { n, tokens: [...tokens.values()], calls: [...calls.values()], tools: [...tools], turns: [...turns].sort((a, b) => a[0] - b[0]).map(([turn, size]) => [`turn ${turn + 1}`, size]) };
}

function tokenTable(title, found) {
  const columns = [
    { name: "token", value: (one) => one.key, show: (one) => h("code", {}, short(one.key, 40)) },
    { name: "push", number: true, value: (one) => one.sum, show: (one) => h(one.sum > 0 ? "b.up" : "b.down", {}, signed(one.sum)) },
    { name: "times", number: true, value: (one) => one.n },
    { name: "most in", value: () => 0, show: (one) => h("a", { href: episodeLink(one.row, { view: "tokens", colour: "weight" }) }, `episode ${REPORT.rows.n[one.row]}`) },
  ];
  return h("section", {}, h("h2", {}, title), table(columns, found, { most: 15, empty: "None." }));
}

function callTable(title, found) {
  const columns = [
    { name: "call", value: (one) => one.key, show: (one) => h("a", { href: episodeLink(one.row) }, h("code", {}, one.key)) },
    { name: "push", number: true, value: (one) => one.sum, show: (one) => h(one.sum > 0 ? "b.up" : "b.down", {}, signed(one.sum)) },
    { name: "times", number: true, value: (one) => one.n },
  ];
  return h("section", {}, h("h2", {}, title), table(columns, found, { most: 10, empty: "None." }));
}

function shareTable(title, found, what) {
  const total = found.reduce((sum, [, size]) => sum + size, 0) || 1;
  return h("section", {}, h("h2", {}, title), h("dl.parts.wide", { "aria-label": what }, [...found].sort((a, b) => (what === "turn" ? 0 : b[1] - a[1])).map(([name, size]) => [h("dt", {}, name), h("dd", {}, h("i.level", { style: { "--level": `${(100 * size) / total}%` } }), percent(size / total))])));
}
