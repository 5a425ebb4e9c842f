// Timeline of one rollout: a row per episode, slowest first; where nobody decodes, the engine is idle.

async function timelineView(wanted) {
  const sets = [...REPORT.chunks.values()];
  if (!sets.length) return [h("h1", {}, "Timeline"), h("p.empty", {}, "No episodes were recorded.")];
  const lasted = (chunk) => {
    const sums = REPORT.runs[chunk.run].sums.find((one) => one.mode === chunk.mode && one.step === chunk.step && one.label === chunk.label);
    return (sums && sums.rollout_s) || 0;
  };
  const trained = sets.filter((chunk) => chunk.mode === "train");
  const slowest = [...(trained.length ? trained : sets)].sort((a, b) => lasted(b) - lasted(a));
  const at = sets.find((chunk) => String(chunk.texts) === wanted.at) || slowest[0];
  const episodes = [];
  for (let row = 0; row < REPORT.n; row++) if (REPORT.rows.chunk[row] === at.texts) episodes.push(row);
  const loaded = await Promise.all(episodes.map(episodeOf));
  const total = Math.max(lasted(at), ...loaded.map((episode) => (episode.qs || 0) + (episode.d || 0)), 1e-6);
  const ordered = [...loaded].sort((a, b) => (b.qs || 0) + (b.d || 0) - (a.qs || 0) - (a.d || 0));
  const busy = loaded.flatMap((episode) => segmentsOf(episode).filter((one) => one.what === "decoding").map((one) => [one.from, one.to]));
  const all = (REPORT.runs[at.run].facts.config?.record_episodes ?? 1) >= 1; // of others nobody knows when they decoded
  const idle = all ? gaps(busy, total) : [];
  const idleSum = idle.reduce((sum, [from, to]) => sum + to - from, 0);
  return [
    h("h1", {}, "Timeline"),
    h("p.quiet", {}, "One rollout: a row for each episode, slowest first. Decoding includes the time a request waits inside the engine."),
    h("div.bar", {},
      choice("Rollout", at.texts, sets.map((chunk) => [chunk.texts, `${placeName(chunk)} (${seconds(lasted(chunk))})`]), (value) => go("timeline", { at: value }, { replace: true })),
      h("a.button", { href: link("timeline", { at: slowest[0].texts }) }, `Slowest: ${placeName(slowest[0])}`)),
    h("p", {}, `${placeName(at)} took ${seconds(lasted(at) || total)}; ${all ? `in ${seconds(idleSum)} of it (${percent(idleSum / total)}) no episode waited for the engine` : "only a share of its episodes was recorded"}.`),
    slowestSentence(ordered[0], total),
    h("div.legend", {}, [["decoding", "decoding"], ["tool", "tool"], ["queued", "waiting for a place"], ["idle", "engine idle"]].map(([name, text]) => h("span", {}, h(`i.swatch.${name}`), text))),
    drawTimeline(ordered.slice(0, 300), total, idle),
    ordered.length > 300 ? h("p.quiet", {}, `The 300 slowest of ${ordered.length}.`) : null,
  ];
}

function slowestSentence(episode, total) {
  if (!episode) return null;
  const sums = segmentSums(episode);
  const tools = new Map();
  for (const turn of episode.turns) for (const result of turn.re || []) tools.set(result.n || "tool", (tools.get(result.n || "tool") || 0) + result.s);
  const worst = [...tools].sort((a, b) => b[1] - a[1])[0];
  const waited = [["decoding", sums.decoding], ["its tools", sums.tool], ["a place to begin", sums.queued], ["everything else", sums.other]].sort((a, b) => b[1] - a[1]);
  return h("p.finding", {}, "The slowest, ", h("a", { href: episodeLink(episode.row) }, `episode ${episode.n}`), `, ended after ${seconds((episode.qs || 0) + episode.d)}. It waited most for ${waited[0][0]}: ${waited.filter(([, value]) => value > 0).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")}`, worst && sums.tool > 0.05 * total ? ` (${worst[0]} ${seconds(worst[1])})` : "", ".");
}

function gaps(intervals, total) {
  const found = [];
  let end = 0;
  for (const [from, to] of [...intervals].sort((a, b) => a[0] - b[0])) {
    if (from > end) found.push([end, Math.min(from, total)]);
    end = Math.max(end, to);
  }
  if (end < total) found.push([end, total]);
  return found.filter(([from, to]) => to - from > total / 2000);
}

function drawTimeline(episodes, total, idle) {
  const rows = episodes.map((episode) => {
    const drawing = svg("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const [from, to] of idle) drawing.append(svg("rect.idle", { x: (1000 * from) / total, y: 0, width: (1000 * (to - from)) / total, height: 14 }));
    for (const one of segmentsOf(episode)) {
      const bar = svg(`rect.segment.${one.what}`, { x: (1000 * one.from) / total, y: one.what === "tool" ? 1 : 3, width: Math.max(1.5, (1000 * (one.to - one.from)) / total), height: one.what === "tool" ? 12 : 8 });
      bar.addEventListener("pointerenter", () => showNote(bar, lines([["what", `${one.what}, ${one.name}`], ["from", seconds(one.from)], ["for", seconds(one.to - one.from)]])));
      bar.addEventListener("pointerleave", hideNote);
      drawing.append(bar);
    }
    const sums = segmentSums(episode);
    return h("a.lane", { href: episodeLink(episode.row), "aria-label": `episode ${episode.n}: ${seconds((episode.qs || 0) + episode.d)}, decoding ${seconds(sums.decoding)}, tools ${seconds(sums.tool)}, queued ${seconds(sums.queued)}` },
      h("span.name", {}, `${episode.n}`), drawing, h("span.took", {}, seconds((episode.qs || 0) + (episode.d || 0))));
  });
  const scale = h("div.lane.ruler", { "aria-hidden": "true" }, h("span.name", {}, "no."), h("span.marks", {}, ticks(0, total).map((value) => h("i", { style: { left: `${(100 * value) / total}%` } }, seconds(value)))), h("span.took", {}, ""));
  return h("div.timeline", {}, scale, rows);
}
