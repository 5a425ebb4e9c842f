// Findings: what the doctor's rules say of the whole run, each with examples.

async function findingsView(wanted) {
  const run = REPORT.runs[Number(wanted.run || 0)] || REPORT.runs[0];
  const sections = await Promise.all(run.findings.map(async (one) => {
    const filter = Object.fromEntries(Object.entries(one.filter).map(([name, value]) => [name, String(value)]));
    if (REPORT.runs.length > 1) filter.run = String(run.number);
    const rows = await rowsOf(filter);
    const examples = spread(rows, 3);
    return h("section.finding", {},
      h("h2", {}, one.rule.replaceAll("_", " ")),
      h("p", {}, one.sentence),
      h("p.quiet", {}, `Reported after ${plural(one.steps.length, "step")}: ${ranges(one.steps)}. What to do: ${one.link}`),
      examples.length ? h("p", {}, "For example ", examples.map((row, place) => [place ? ", " : "", h("a", { href: episodeLink(row) }, `episode ${REPORT.rows.n[row]}`)]), ". ", h("a", { href: link("find", filter) }, `All ${rows.length.toLocaleString("en-US")}`)) : null);
  }));
  const warnings = run.events.filter((event) => !["checkpoint", "finished"].includes(event.what));
  return [
    h("h1", {}, "Findings"),
    runChoice(wanted, "findings"),
    run.findings.length ? sections : h("p.empty", {}, run.steps.length ? "The rules found nothing wrong in this run." : "There are no step metrics (steps.jsonl) for the rules to check."),
    warnings.length ? h("section", {}, h("h2", {}, "Events"), table([
      { name: "step", number: true, value: (event) => event.step, show: (event) => shownStep(event.step) },
      { name: "what", value: (event) => event.what, show: (event) => h("span.badge", {}, event.what) },
      { name: "text", value: (event) => event.text, show: (event) => short(event.text, 400) },
    ], warnings)) : null,
  ];
}

// Some of the rows, from all over.
function spread(rows, n) {
  if (rows.length <= n) return rows;
  return Array.from({ length: n }, (_, place) => rows[Math.floor(((place + 0.5) * rows.length) / n)]);
}

function ranges(steps) {
  const found = [];
  for (const step of steps) {
    const last = found.at(-1);
    if (last && step <= last[1] + 1) last[1] = step;
    else found.push([step, step]);
  }
  const text = found.slice(0, 6).map(([from, to]) => (from === to ? String(from) : `${from} to ${to}`)).join(", ");
  return found.length > 6 ? `${text} and later` : text;
}
