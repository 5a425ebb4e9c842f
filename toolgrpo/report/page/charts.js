// Small charts in SVG: lines with bands, and stacked columns. One drawing is W units wide and scales
// with its box. Pointer or arrow keys move a cursor over the steps; a note gives the values there.

const W = 560;
const H = 190;
const PAD = { left: 54, right: 18, top: 10, bottom: 22 };
const EVENT_MARKS = { warning: "!", checkpoint: "▾", resumed: "↻", finding: "?", stopped: "■", finished: "●" };

// chart({title, unit, series: [{name, points: [[x, y, low, high]]}], stacked, whole (counts), events, range})
function chart({ title, hint, series, stacked = false, whole = false, events = [], range = null, show = num }) {
  const given = series.filter((one) => one.points.some((point) => point[1] !== null));
  const xs = [...new Set(given.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  if (!xs.length) return null;
  const at = given.map((one) => new Map(one.points.map((point) => [point[0], point])));
  const sums = xs.map((x) => at.reduce((sum, points) => sum + ((points.get(x) || [])[1] || 0), 0));
  const [low, high] = range || extent(given, stacked ? sums : null);
  const marks = ticks(low, high, whole ? 1 : 0);
  const labels = distinct(marks, show);
  const left = Math.max(PAD.left, 12 + 6.5 * Math.max(...labels.map((label) => label.length)));
  const x = (value) => left + ((value - xs[0] + (stacked ? 0.5 : 0)) / Math.max(1, xs.at(-1) - xs[0] + (stacked ? 1 : 0))) * (W - left - PAD.right);
  const y = (value) => H - PAD.bottom - ((value - low) / (high - low || 1)) * (H - PAD.top - PAD.bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}, by step` });
  drawing.append(...axes(marks, labels, left, xs, x, y));
  if (stacked) drawing.append(...columns(given, at, xs, x, y, low));
  else given.forEach((one, number) => drawing.append(...curve(one, number, x, y)));
  for (const event of events) {
    if (event.x < xs[0] || event.x > xs.at(-1)) continue;
    drawing.append(svg(`line.event.${event.what}`, { x1: x(event.x), x2: x(event.x), y1: PAD.top, y2: H - PAD.bottom }));
    drawing.append(svg(`text.event.${event.what}`, { x: x(event.x), y: PAD.top + 4, "text-anchor": "middle" }, EVENT_MARKS[event.what] || "·"));
  }
  const cursor = svg("line.cursor", { y1: PAD.top, y2: H - PAD.bottom, visibility: "hidden" });
  drawing.append(cursor);
  const legend = h("div.legend", {}, given.map((one, number) => h("span", {}, h(`i.swatch.s${one.colour ?? number % 8}`), one.name)));
  const box = h("figure.chart", { tabindex: "0" },
    h("figcaption", {}, h("b", {}, title), hint ? h("span", {}, hint) : null),
    drawing,
    given.length > 1 ? legend : null);
  followPointer(box, drawing, xs, x, cursor, (value) => [
    h("b", {}, `step ${value}`),
    lines(given.map((one, number) => {
      const point = at[number].get(value);
      if (!point || point[1] === null) return [one.name, null];
      return [one.name, point.length > 3 ? `${show(point[1])}  (${show(point[2])} to ${show(point[3])})` : show(point[1])];
    })),
    events.filter((event) => event.x === value).map((event) => h("p.eventnote", {}, `${event.what}: ${event.text}`.slice(0, 300))),
  ]);
  return box;
}

function extent(given, sums) {
  const values = sums || given.flatMap((one) => one.points.flatMap((point) => point.slice(1).filter((value) => value !== null)));
  let [low, high] = [-largest(values.map((value) => -value), -Infinity), largest(values, -Infinity)];
  if (low > 0 && low < 0.5 * high) low = 0;
  if (sums) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  return [low, high];
}

// The labels of an axis: no two alike, as far as more digits tell them apart.
function distinct(marks, show) {
  for (let digits = 3; digits < 9; digits++) {
    const labels = marks.map((value) => show(value, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return marks.map((value, place) => (place && show(value) === show(marks[place - 1]) ? "" : show(value)));
}

function axes(marks, labels, left, xs, x, y) {
  const parts = [];
  marks.forEach((value, place) => {
    parts.push(svg("line.grid", { x1: left, x2: W - PAD.right, y1: y(value), y2: y(value) }));
    parts.push(svg("text.tick", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, labels[place]));
  });
  const wanted = Math.min(6, xs.length);
  const marked = new Set(Array.from({ length: wanted }, (_, place) => xs[Math.round((place * (xs.length - 1)) / Math.max(1, wanted - 1))]));
  for (const value of marked) parts.push(svg("text.tick", { x: x(value), y: H - 6, "text-anchor": "middle" }, String(value)));
  return parts;
}

function ticks(low, high, least = 0) {
  const raw = Math.max((high - low) / 4 || 1, least);
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, least ? 3 : 2.5, 5, 10].map((factor) => factor * size).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(10)));
  return found;
}

function curve(one, number, x, y) {
  const parts = [];
  const points = one.points.filter((point) => point[1] !== null);
  const colour = `s${one.colour ?? number % 8}`;
  if (points.some((point) => point.length > 3) && points.length > 1) {
    const upper = points.map((point) => `${x(point[0])},${y(point[3] ?? point[1])}`);
    const lower = points.map((point) => `${x(point[0])},${y(point[2] ?? point[1])}`).reverse();
    parts.push(svg(`polygon.band.${colour}`, { points: [...upper, ...lower].join(" ") }));
  }
  if (points.length > 1) parts.push(svg(`polyline.line.${colour}`, { points: points.map((point) => `${x(point[0])},${y(point[1])}`).join(" ") }));
  if (points.length < 40) for (const point of points) parts.push(svg(`circle.dot.${colour}`, { cx: x(point[0]), cy: y(point[1]), r: points.length > 1 ? 2 : 4 }));
  return parts;
}

function columns(given, at, xs, x, y, low) {
  const parts = [];
  const width = Math.max(1, (x(xs[0] + 1) - x(xs[0])) * 0.84);
  for (const value of xs) {
    let base = low;
    given.forEach((one, number) => {
      const height = (at[number].get(value) || [])[1] || 0;
      if (height > 0) {
        const top = y(base + height);
        parts.push(svg(`rect.column.s${one.colour ?? number % 8}`, { x: x(value) - width / 2, y: top, width, height: Math.max(0, y(base) - top) }));
      }
      base += height;
    });
  }
  return parts;
}

function followPointer(box, drawing, xs, x, cursor, describe) {
  let place = xs.length - 1;
  const show = () => {
    cursor.setAttribute("x1", x(xs[place]));
    cursor.setAttribute("x2", x(xs[place]));
    cursor.setAttribute("visibility", "visible");
    showNote(cursor, ...describe(xs[place]));
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    hideNote();
  };
  box.addEventListener("pointermove", (event) => {
    const bounds = drawing.getBoundingClientRect();
    const wanted = ((event.clientX - bounds.left) / bounds.width) * W;
    place = xs.reduce((best, value, number) => (Math.abs(x(value) - wanted) < Math.abs(x(xs[best]) - wanted) ? number : best), 0);
    show();
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("focus", show);
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    place = Math.min(xs.length - 1, Math.max(0, place + by));
    show();
  });
}
