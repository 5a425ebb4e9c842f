// The token view: each token of an episode as a span, coloured by what was asked for.

const COLOURS = {
  mask: { name: "what is trained on", needs: null, of: (token) => (token.sampled ? 1 : 0), show: (value) => (value ? "sampled" : "context"), legend: ["context: not trained on", "sampled by the model"] },
  weight: { name: "push: advantage × (1 − p)", needs: "weight", two: true, legend: ["pushed down", "pushed up"] },
  logprob: { name: "probability", needs: "logprob", of: (token) => (token.logprob === null ? null : Math.min(1, -token.logprob / 5)), legend: ["certain", "unlikely"] },
  entropy: { name: "entropy (training pass)", needs: "entropy", of: (token) => (token.entropy === null ? null : Math.min(1, token.entropy / 3)), legend: ["0 nats", "3 nats or more"] },
  difference: { name: "trainer − engine", needs: "difference", two: true, legend: ["engine more certain", "trainer more certain"] },
  correction: { name: "correction", needs: "correction", two: true, of: (token) => (token.correction === null ? null : token.correction === 0 ? -1 : Math.max(-1, Math.min(1, (token.correction - 1) * 5))), legend: ["left out or weakened", "strengthened"] },
  advantage: { name: "advantage", needs: "advantage", two: true, legend: ["negative", "positive"] },
};

async function tokenView(episode, wanted, set) {
  const { prompt, tokens, seen } = await tokensOf(episode.row);
  const usable = Object.entries(COLOURS).filter(([, colour]) => !colour.needs || tokens.some((token) => token[colour.needs] !== null && token[colour.needs] !== undefined));
  const chosen = usable.some(([name]) => name === wanted.colour) ? wanted.colour : episode.turns.some((turn) => turn.ta !== undefined) ? "advantage" : usable.some(([name]) => name === "weight") && episode.a ? "weight" : "mask";
  const colour = COLOURS[chosen];
  const scale = colour.two && !colour.of ? largest(tokens.map((token) => Math.abs(token[colour.needs] || 0)), 1e-12) : 1;
  const level = colour.of || ((token) => (token[colour.needs] === null || token[colour.needs] === undefined ? null : token[colour.needs] / scale));
  return [
    h("div.bar", {},
      choice("Colour", chosen, usable.map(([name, one]) => [name, one.name]), (value) => set({ colour: value })),
      h("span.scale", {}, h(colour.two ? "i.two" : "i.one"), h("span", {}, `${colour.legend[0]} … ${colour.legend[1]}`)),
      seen ? null : h("span.quiet", {}, "This episode has no entropy, trainer and correction: training records them for a few episodes per step (record_tokens).")),
    h("details.prompttokens", {}, h("summary", {}, `Prompt, ${plural(prompt.length, "token")}`), h("div.tokens", {}, spans(prompt, episode, null, () => null))),
    tokenFlow(tokens, episode, chosen, level),
    pushed(tokens),
  ];
}

const MOST_TOKENS = 4000;

function tokenFlow(tokens, episode, chosen, level) {
  const box = h("div.tokens", { "aria-label": "Tokens after the prompt", role: "group" });
  let shown = 0;
  const more = h("button.more", { type: "button", onclick: () => draw() });
  const draw = () => {
    add(box, [spans(tokens.slice(shown, shown + MOST_TOKENS), episode, chosen, level)]);
    shown += MOST_TOKENS;
    more.hidden = shown >= tokens.length;
    fill(more, `Show more of ${plural(tokens.length, "token")}`);
  };
  draw();
  moveByKeys(box);
  return h("div", {}, box, more);
}

function spans(tokens, episode, chosen, level) {
  const made = [];
  const begins = new Map((episode.seg || []).map(([start], place) => [start, place]));
  for (const token of tokens) {
    if (begins.has(token.index)) made.push(segmentMark(episode, begins.get(token.index)));
    const value = level(token);
    const classes = ["token", token.sampled ? "sampled" : "given", token.special ? "special" : "", token.bytes ? "half" : ""].filter(Boolean).join(".");
    const span = h(`span.${classes}`, { tabindex: "-1" });
    if (value !== null && value !== undefined && chosen) {
      span.style.setProperty("--amount", `${Math.round(Math.min(1, Math.abs(value)) * 85)}%`);
      span.classList.add(value < 0 ? "down" : chosen === "weight" || (COLOURS[chosen] || {}).two ? "up" : "warm");
    }
    add(span, [shownToken(token)]);
    span.addEventListener("pointerenter", () => showNote(span, describe(token, episode)));
    span.addEventListener("pointerleave", hideNote);
    span.addEventListener("focus", () => showNote(span, describe(token, episode)));
    span.addEventListener("click", () => span.focus());
    made.push(span);
    if (token.text.includes("\n") && !token.special) made.push(h("br"));
  }
  const first = made.find((one) => one.tabIndex === -1 && one.classList.contains("token"));
  if (first) first.tabIndex = 0;
  return made;
}

// Spaces and line ends are shown where a token is nothing else; part of a character shows its bytes.
function shownToken(token) {
  if (token.bytes) return `‹${token.bytes}›`;
  const text = token.text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  if (text === "") return "∅";
  return /^ +$/.test(text) ? text.replaceAll(" ", "␣") : text;
}

function describe(token, episode) {
  const text = JSON.stringify(token.text);
  return lines([
    ["token", `${token.id}`],
    ["text", text.length > 200 ? `${text.slice(0, 200)}…` : text],
    ["bytes", token.bytes || (new TextEncoder().encode(token.text).length > 40 ? null : [...new TextEncoder().encode(token.text)].map((byte) => byte.toString(16).padStart(2, "0")).join(" "))],
    ["kind", token.special ? `special, ${token.sampled ? "sampled" : "context"}` : token.sampled ? "sampled" : "context, not trained on"],
    ...(token.sampled ? [
      ["probability", token.p === null ? null : `${num(token.p)} (log ${num(token.logprob)})`],
      ["trainer − engine", token.difference === null || token.difference === undefined ? null : signed(token.difference)],
      ["entropy", token.entropy === null || token.entropy === undefined ? null : `${num(token.entropy)} nats`],
      ["correction", token.correction === null || token.correction === undefined ? null : token.correction === 0 ? "left out" : `× ${num(token.correction, 6)}`],
      ["advantage", token.advantage === null ? null : signed(token.advantage)],
      ["push", token.weight === null ? null : signed(token.weight)],
      ["turn", token.turn >= 0 ? String(token.turn + 1) : null],
      ["weights of", weightsOf(token, episode)],
    ] : []),
  ]);
}

// Weights may have changed while a turn was drawn.
function weightsOf(token, episode) {
  const turn = (episode.turns || [])[token.turn] || {};
  const [first, last] = turn.w || [episode.w, episode.w];
  if (first === undefined) return null;
  return first === last ? `step ${first} done` : `step ${first} to ${last} done`;
}

// The tokens that training moved most, in words.
function pushed(tokens) {
  const moved = tokens.filter((token) => token.weight).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 8);
  if (!moved.length) return null;
  return h("section", {}, h("h3", {}, "Moved most"), h("ul.moved", {}, moved.map((token) => h("li", {}, h(token.weight > 0 ? "b.up" : "b.down", {}, signed(token.weight)), " ", h("code", {}, shownToken(token)), h("span.quiet", {}, ` p ${num(token.p)}${token.turn >= 0 ? `, turn ${token.turn + 1}` : ""}`)))));
}

// One stop for Tab, arrow keys inside.
function moveByKeys(box) {
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    const all = [...box.querySelectorAll(".token")];
    const next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(document.activeElement) + by))];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });
}
