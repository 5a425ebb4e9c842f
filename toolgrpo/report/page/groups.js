// Groups: the episodes of one question in one step; a table of all, and a page for each.

function groupsView(wanted) {
  const modes = [...new Set(REPORT.groups.filter((group) => group.rows.length > 1).map((group) => group.at.mode))];
  const steps = [...new Set(REPORT.groups.filter((group) => group.at.mode === "train" && (!wanted.run || String(group.at.run) === wanted.run)).map((group) => group.at.step))].sort((a, b) => a - b);
  const text = (wanted.text || "").toLowerCase();
  const found = REPORT.groups.filter((group) =>
    group.rows.length > 1 &&
    (!wanted.run || String(group.at.run) === wanted.run) &&
    (!wanted.step || (group.at.mode === "train" && String(shownStep(group.at.step)) === wanted.step)) &&
    (!wanted.mode || group.at.mode === wanted.mode) &&
    (!wanted.kind || (wanted.kind === "live" ? !group.dead : group.dead && (wanted.kind === "dead" || wanted.kind === deadBy(group)))) &&
    (!text || previewOf(group.rows[0]).toLowerCase().includes(text)));
  const set = (changes) => go("groups", { ...wanted, ...changes }, { replace: true });
  const search = h("input", { type: "search", value: wanted.text || "", placeholder: "words of the question", onchange: () => set({ text: search.value }) });
  const columns = [
    { name: "question", value: (group) => previewOf(group.rows[0]), show: (group) => h("a.question", { href: groupLink(group) }, previewOf(group.rows[0]) || "(empty)") },
    { name: "step", number: true, value: (group) => group.at.run * 1e9 + group.at.step, show: (group) => ofRun(group.at, wanted) + (group.at.mode === "train" ? shownStep(group.at.step) : group.at.mode) },
    { name: "rewards", value: (group) => group.spread, show: (group) => strip(group) },
    { name: "reward", number: true, value: (group) => group.mean, show: (group) => num(group.mean) },
    { name: "success", number: true, value: (group) => (group.scored ? group.ok / group.scored : null), show: (group) => `${group.ok}/${group.scored}` },
    { name: "state", value: (group) => Number(group.dead), show: (group) => deadBadge(group) },
    { name: "calls", number: true, value: (group) => group.calls, show: (group) => num(group.calls) },
    { name: "failed", number: true, value: (group) => group.failed },
    { name: "tokens", number: true, value: (group) => group.gen, show: (group) => num(group.gen) },
  ];
  return [
    h("h1", {}, "Groups"),
    h("p.quiet", {}, "The episodes of one question in one step. A group whose rewards are all alike is dead: it teaches nothing."),
    runChoice(wanted, "groups", [["", "both"]]),
    h("form.bar", { role: "search", onsubmit: (event) => { event.preventDefault(); set({ text: search.value }); } },
      choice("Step", wanted.step, [["", "all"], ...steps.map((step) => shownStep(step))], (step) => set({ step })),
      modes.length > 1 ? choice("Mode", wanted.mode, [["", "all"], ...modes], (mode) => set({ mode })) : null,
      choice("State", wanted.kind, [["", "all"], ["live", "live"], ["dead", "dead"], ["failed", "dead, all failed"], ["solved", "dead, all solved"], ["both", "dead, both ways"], ["dropped", "dead, all dropped"]], (kind) => set({ kind })),
      h("label.field.grow", {}, h("span", {}, "Question"), search)),
    h("p.count", { role: "status" }, plural(found.length, "group")),
    table(columns, found, { sort: wanted.sort || "step", down: wanted.down === "1", onsort: (sort, down) => set({ sort, down: down ? 1 : 0 }), href: groupLink, empty: "No group matches this filter." }),
  ];
}

// How a group whose rewards are all alike ended; one may be paid alike for success and for failure.
const deadBy = (group) => (!group.scored ? "dropped" : !group.ok ? "failed" : group.ok === group.scored ? "solved" : "both");

function deadBadge(group) {
  if (!group.dead) return h("span.badge.good", {}, "live");
  return h("span.badge", {}, { failed: "dead, all failed", solved: "dead, all solved", both: "dead, both ways", dropped: "dead, all dropped" }[deadBy(group)]);
}

// A square for each episode of a group, best first.
function strip(group) {
  const ordered = [...group.rows].sort((a, b) => compared(REPORT.rows.r[b], REPORT.rows.r[a]));
  const top = topOfRun();
  return h("span.strip", { "aria-label": ordered.map((row) => num(REPORT.rows.r[row])).join(", ") },
    ordered.map((row) => h(REPORT.rows.ok[row] ? "i.cell.ok" : "i.cell", { style: { "--level": `${Math.round(100 * Math.max(0, (REPORT.rows.r[row] || 0) / (top || 1)))}%` } })));
}

let topCached = null;
function topOfRun() {
  if (topCached === null) topCached = topReward();
  return topCached;
}

async function groupView(parts, wanted) {
  const row = rowAt(parts[0], parts[1]);
  if (row === null) return [h("h1", {}, "There is no such group here"), h("p", {}, h("a", { href: link("groups") }, "All groups"))];
  const group = REPORT.groupOf[row];
  const episodes = (await Promise.all(group.rows.map(episodeOf))).sort((a, b) => compared(b.r, a.r));
  const number = REPORT.groups.indexOf(group);
  const siblings = [REPORT.groups[number - 1], REPORT.groups[number + 1]];
  return [
    h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: link("groups") }, "Groups"), " / ", h("a", { href: link("groups", { step: group.at.mode === "train" ? shownStep(group.at.step) : null, run: REPORT.runs.length > 1 ? group.at.run : null }) }, placeName(group.at)),
      h("span.step", {}, siblings[0] ? h("a", { href: groupLink(siblings[0]), "data-key": "k" }, "← previous") : null, siblings[1] ? h("a", { href: groupLink(siblings[1]), "data-key": "j" }, "next →") : null)),
    h("h1", {}, previewOf(row) || "(empty question)"),
    h("p", {}, deadBadge(group), " ", `${group.ok} of ${plural(group.scored, "episode")} succeeded, mean reward ${num(group.mean)}`,
      episodes[0].columns.answer !== undefined ? h("span.quiet", {}, ` · answer of the row: `, h("code", {}, short(contentText(episodes[0].columns.answer), 200))) : null),
    h("section", {}, h("h2", {}, "Where they diverge"), h("p.quiet", {}, "Each box has the text and the calls of one turn. Episodes share a box as long as they do the same."), prefixTree(episodes)),
    h("section", {}, h("h2", {}, "Side by side"), h("div.side", {}, episodes.map((episode) => sideCard(episode)))),
  ];
}

function short(text, most = 120) {
  const flat = String(text).replace(/\s+/g, " ").trim();
  return flat.length > most ? `${flat.slice(0, most - 1)}…` : flat;
}

function sideCard(episode) {
  return h("article.episode", {},
    h("header", {}, h("a.reward", { href: episodeLink(episode.row) }, num(episode.r)), h("span.quiet", {}, ` reward · advantage ${episode.a === undefined ? "–" : signed(episode.a)}`), h("div", {}, badges(episode.row))),
    rewardParts(episode),
    turnsInShort(episode),
    h("footer", {}, h("a", { href: episodeLink(episode.row) }, `Episode ${episode.n}`), h("a", { href: episodeLink(episode.row, { view: "tokens", colour: "weight" }) }, "Tokens")));
}

function rewardParts(episode) {
  const parts = Object.entries(episode.rw || {});
  if (!parts.length) return null;
  const top = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value || 0)), 1);
  return h("dl.parts", {}, parts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, h("i.level", { style: { "--level": `${(100 * Math.max(0, value || 0)) / top}%` } }), value === null ? "not scored" : num(value))]));
}

function turnsInShort(episode) {
  return h("ol.short", {}, episode.turns.map((turn) => h("li", {},
    (turn.at || []).map((attempt, place) => {
      const result = (turn.re || [])[place];
      return h("div.call", {}, h("code", {}, callText(attempt)), result ? h(result.e ? "span.bad" : "span.answer", {}, ` → ${short(result.c, 80)}`) : h("span.quiet", {}, " (not answered)"));
    }),
    turn.c ? h("p", {}, short(turn.c, 300)) : null,
    turn.cut ? h("span.badge.warn", {}, "cut") : null)));
}

function callText(attempt) {
  if (attempt.st && attempt.raw) return short(attempt.raw, 100);
  const given = attempt.a && typeof attempt.a === "object" ? Object.entries(attempt.a).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ") : "";
  return short(`${attempt.n || "?"}(${given})`, 120);
}

// The prefix tree at turn level, as nested boxes: what was done, by how many, and what they got.
function prefixTree(episodes) {
  const grow = (members, depth) => {
    const branches = new Map();
    for (const episode of members) {
      const turn = episode.turns[depth];
      const key = turn ? turnKey(turn) : "";
      if (!branches.has(key)) branches.set(key, []);
      branches.get(key).push(episode);
    }
    const ordered = [...branches.values()].sort((a, b) => b.length - a.length || compared(b[0].r, a[0].r));
    return ordered.map((branch) => {
      const turn = branch[0].turns[depth];
      if (!turn) return null;
      const rewards = branch.map((episode) => episode.r);
      const ends = branch.filter((episode) => episode.turns.length === depth + 1);
      return h("li", {},
        h("div.node", {},
          h("div.said", {}, (turn.at || []).map((attempt, place) => h("div.call", {}, h("code", {}, callText(attempt)), (turn.re || [])[place] ? h(turn.re[place].e ? "span.bad" : "span.answer", {}, ` → ${short(turn.re[place].c, 60)}`) : null)), turn.c ? short(turn.c, 120) : turn.at ? null : h("span.quiet", {}, "(nothing)")),
          h("div.who", {}, h("b", {}, `${branch.length}×`), " ", range(rewards), ends.map((episode) => h(`a.leaf${episode.ok ? ".good" : ""}`, { href: episodeLink(episode.row), title: `episode ${episode.n}, reward ${num(episode.r)}` }, num(episode.r))))),
        branch.some((episode) => episode.turns.length > depth + 1) ? h("ul", {}, grow(branch.filter((episode) => episode.turns.length > depth + 1), depth + 1)) : null);
    });
  };
  return h("div.scroll", {}, h("ul.tree", {}, grow(episodes.filter((episode) => episode.turns.length), 0)));
}

function range(values) {
  const given = values.filter((value) => value !== null && value !== undefined);
  if (!given.length) return "";
  const [low, high] = [Math.min(...given), Math.max(...given)];
  return h("span.quiet", {}, low === high ? `reward ${num(low)}` : `reward ${num(low)} to ${num(high)}`);
}

function turnKey(turn) {
  return JSON.stringify([turn.at ? "" : turn.c, (turn.at || []).map((attempt) => [attempt.n, attempt.a, attempt.st]), (turn.re || []).map((result) => result.c)]);
}
