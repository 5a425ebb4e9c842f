// Find: all episodes that a filter leaves. The filter is the address, so a link goes to it.

const READY = [
  ["", "all episodes"],
  ["hack", "reward high, but no success"],
  ["repeated", "the same call repeated"],
  ["void", "void turns"],
  ["copied", "answers with a copy of a result"],
  ["nocall", "never called a tool"],
  ["failedcall", "a call failed"],
  ["brokencall", "a call that cannot be run"],
  ["cut", "cut by a limit"],
  ["dropped", "dropped"],
  ["dead", "in a dead group"],
  ["live", "in a live group"],
];

async function findView(wanted) {
  const set = (changes) => go("find", { ...wanted, ...changes }, { replace: true });
  const status = h("p.count", { role: "status" }, "Searching ...");
  const results = h("div");
  const text = h("input", { type: "search", id: "find-text", value: wanted.text || "", placeholder: "what was asked, said, called or answered", oninput: () => later(() => set({ text: text.value })) });
  const number = (name, label) => {
    const input = h("input.small", { type: "number", step: "any", value: wanted[name] ?? "", onchange: () => set({ [name]: input.value }) });
    return h("label.field", {}, h("span", {}, label), input);
  };
  const any = (names) => [["", "any"], ...names.map((name) => [name, name.replaceAll("_", " ")])];
  const began = performance.now();
  const search = rowsOf(wanted, (done, all) => fill(status, `Reading texts: ${Math.round((100 * done) / all)} %`)).then((found) => {
    const ok = successOf(found);
    fill(status, `${plural(found.length, "episode")} of ${REPORT.n.toLocaleString("en-US")}${ok === null ? "" : `, ${percent(ok)} successful`}${inPart(REPORT.runs)}`);
    status.dataset.milliseconds = String(Math.round(performance.now() - began));
    fill(results, episodeTable(found, wanted, set));
  });
  if (!(wanted.text || "").trim()) await search; // only a search for words may take a moment
  return [
    h("h1", {}, "Find"),
    h("form.bar", { role: "search", onsubmit: (event) => { event.preventDefault(); set({ text: text.value }); } },
      h("label.field.whole", {}, h("span", {}, "Text"), text),
      choice("Ready filters", wanted.ready, READY, (ready) => set({ ready })),
      choice("Tool", wanted.tool, any(REPORT.tools), (tool) => set({ tool })),
      choice("Cause", wanted.cause, any(REPORT.causes), (cause) => set({ cause })),
      choice("Ended", wanted.stop, any(REPORT.stops), (stop) => set({ stop })),
      choice("Success", wanted.success, [["", "any"], ["yes", "yes"], ["no", "no"]], (success) => set({ success })),
      number("min", "Reward from"), number("max", "to"), number("from", "Step from"), number("to", "to"),
      REPORT.runs.length > 1 ? choice("Run", wanted.run, [["", "both"], ...REPORT.runs.map((run, place) => [place, run.name])], (run) => set({ run })) : null,
      wanted.q ? h("button.button", { type: "button", onclick: () => set({ q: "" }) }, "one question ✕") : null,
      h("a.button", { href: link("find") }, "Clear")),
    status, results,
  ];
}

let waiting = null;
function later(action) {
  clearTimeout(waiting);
  waiting = setTimeout(action, 100);
}

function episodeTable(found, wanted, set) {
  const { rows } = REPORT;
  const columns = [
    { name: "question", value: previewOf, show: (row) => h("a.question", { href: episodeLink(row) }, previewOf(row) || "(empty)") },
    { name: "step", number: true, value: (row) => atOf(row).run * 1e9 + atOf(row).step, show: (row) => ofRun(atOf(row), wanted) + (atOf(row).mode === "train" ? shownStep(atOf(row).step) : atOf(row).label || atOf(row).mode) },
    { name: "reward", number: true, value: (row) => rows.r[row], show: (row) => num(rows.r[row]) },
    { name: "advantage", number: true, value: (row) => rows.a[row], show: (row) => (rows.a[row] === null ? "–" : signed(rows.a[row])) },
    { name: "marks", value: (row) => rows.flags[row], show: badges },
    { name: "turns", number: true, value: (row) => rows.turns[row] },
    { name: "calls", number: true, value: (row) => rows.calls[row] },
    { name: "tokens", number: true, value: (row) => rows.gen[row] },
    { name: "time", number: true, value: (row) => rows.s[row], show: (row) => seconds(rows.s[row]) },
  ];
  return table(columns, found, { sort: wanted.sort, down: wanted.down !== "0", onsort: (sort, down) => set({ sort, down: down ? 1 : 0 }), href: (row) => episodeLink(row), empty: "No episode matches this filter." });
}
