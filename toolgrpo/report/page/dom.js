// Elements, numbers and words. Everything that a model, a tool or a row wrote goes through `visible`
// and into text nodes: nothing of it is ever parsed as HTML.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\p{Cs}]/gu;

// What steers a terminal or turns the reading direction is written out, as \u202e.
function visible(text) {
  return String(text).replace(UNSEEN, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const SVG = "http://www.w3.org/2000/svg";

// h("p.note", {title: "..."}, "text", h("b", {}, "more")): an element with its classes, attributes and children.
function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  return filled(element, attributes, children);
}

function svg(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElementNS(SVG, tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  return filled(element, attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "href" && !/^(#|https:\/\/)/.test(value)) continue; // no other link is ours
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

// The largest of any number of values; `Math.max(...values)` takes about 120,000.
const largest = (values, least) => values.reduce((most, value) => Math.max(most, value), least);

// Numbers as people read them.
function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(1).replace("e+", "e").replace(/^-/, "−");
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(0);
  if (size < 0.001) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return String(Number(value.toPrecision(digits))).replace(/^-/, "−");
}

const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${share >= 0.1 || share === 0 ? Math.round(share * 100) : Math.round(share * 1000) / 10} %`);

// A name that a model made up may be hard to see.
const named = (name) => (name !== name.trim() || name === "" ? JSON.stringify(name) : short(name, 40));
const signed = (value) => (value > 0 ? `+${num(value)}` : num(value));
const plural = (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${num(value * 1000, 2)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${num(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

// Wilson's interval of a share.
function interval(successes, n) {
  if (!n) return [0, 1];
  const z = 1.96;
  const p = successes / n;
  const scale = 1 + (z * z) / n;
  const centre = (p + (z * z) / (2 * n)) / scale;
  const half = (z * Math.sqrt((p * (1 - p)) / n + (z * z) / (4 * n * n))) / scale;
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

// Links inside the page: link("find", {tool: "add"}) is #/find?tool=add
function link(path, wanted = {}) {
  const words = Object.entries(wanted).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${path}${words.length ? `?${new URLSearchParams(words)}` : ""}`;
}

function route() {
  const [path, words] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean), wanted: Object.fromEntries(new URLSearchParams(words || "")) };
}

// Change some words of the address; the view that stands there is drawn again.
function go(path, wanted, { replace = false } = {}) {
  const target = link(path, wanted);
  if (replace) {
    history.replaceState(null, "", target);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

const episodeLink = (row, wanted = {}) => {
  const at = atOf(row);
  return link(`episode/${at.texts}/${REPORT.rows.place[row]}`, wanted);
};
const groupLink = (group) => link(`group/${group.at.texts}/${REPORT.rows.place[group.rows[0]]}`);

function rowAt(chunk, place) {
  for (let row = 0; row < REPORT.n; row++) {
    if (REPORT.rows.chunk[row] === Number(chunk) && REPORT.rows.place[row] === Number(place)) return row;
  }
  return null;
}

function choice(label, value, options, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    select.append(h("option", { value: key, selected: String(key) === String(value ?? "") }, text));
  }
  return h("label.field", {}, h("span", {}, label), select);
}

// A table whose columns can be sorted. A column: {name, value(row), show(row), number}
function table(columns, rows, { sort, down = true, onsort, most = 100, href, empty = "Nothing here." } = {}) {
  const column = columns.find((one) => one.name === sort);
  const ordered = column ? [...rows].sort((a, b) => compared(column.value(a), column.value(b)) * (down ? -1 : 1)) : rows;
  const body = h("tbody");
  let shown = 0;
  const more = h("button.more", { type: "button", onclick: () => draw() }, "");
  const draw = () => {
    for (const row of ordered.slice(shown, shown + most)) {
      const line = h("tr", {}, columns.map((one) => h(one.number ? "td.number" : "td", { "data-name": one.name }, one.show ? one.show(row) : one.value(row))));
      if (href) {
        const target = href(row);
        line.classList.add("leads");
        line.addEventListener("click", (event) => {
          if (!event.target.closest("a, button") && !String(getSelection())) location.hash = target;
        });
      }
      body.append(line);
    }
    shown = Math.min(ordered.length, shown + most);
    more.hidden = shown >= ordered.length;
    fill(more, `Show ${Math.min(most, ordered.length - shown)} more of ${(ordered.length - shown).toLocaleString("en-US")}`);
  };
  draw();
  const head = h("tr", {}, columns.map((one) => {
    const cell = h(one.number ? "th.number" : "th", { scope: "col" });
    if (onsort && one.value && one.sorts !== false) {
      const mark = one.name === sort ? (down ? " ↓" : " ↑") : "";
      cell.append(h("button", { type: "button", onclick: () => onsort(one.name, one.name === sort ? !down : true) }, one.name + mark));
      if (one.name === sort) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    } else add(cell, [one.name]);
    return cell;
  }));
  if (!ordered.length) return h("p.empty", {}, empty);
  return h("div.table", {}, h("table", {}, h("thead", {}, head), body), more);
}

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

// The small marks of an episode.
function badges(row) {
  const { rows } = REPORT;
  const marks = [];
  if (rows.flags[row] & FLAGS.dropped) marks.push(h("span.badge.warn", {}, "dropped"));
  if (rows.ok[row] !== null) marks.push(rows.ok[row] ? h("span.badge.good", {}, "success") : h("span.badge.bad", {}, "no success"));
  const stop = REPORT.stops[rows.stop[row]];
  if (rows.flags[row] & FLAGS.cut) marks.push(h("span.badge.warn", {}, `cut: ${stop.replace("_", " ")}`));
  if (rows.failed[row]) marks.push(h("span.badge.warn", {}, plural(rows.failed[row], "failed call")));
  if (rows.flags[row] & FLAGS.repeated) marks.push(h("span.badge", {}, "repeats a call"));
  if (rows.flags[row] & FLAGS.void) marks.push(h("span.badge", {}, "void turn"));
  if (rows.flags[row] & FLAGS.copied) marks.push(h("span.badge", {}, "copies a result"));
  if (rows.flags[row] & FLAGS.nocall && REPORT.tools.length) marks.push(h("span.badge", {}, "no call"));
  return marks;
}

// One floating note, for what the pointer or the keyboard is on.
const note = h("div.hovernote", { role: "status", hidden: true });

function showNote(target, ...children) {
  fill(note, ...children);
  note.hidden = false;
  const box = target.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - note.offsetWidth - 8);
  const below = box.bottom + 8 + note.offsetHeight < innerHeight;
  note.style.left = `${Math.max(8, left)}px`;
  note.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - note.offsetHeight - 6)}px`;
}

function hideNote() {
  note.hidden = true;
}

const lines = (pairs) => h("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
