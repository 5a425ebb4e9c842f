// The data of the page. It stands in blocks <script type="text/plain" id="c0"> that no browser runs:
// base64 of compressed JSON, decoded when it is looked at. A block is a list of pieces; piece 2003 is
// the fourth of block c2. `REPORT` is filled by `openReport`.

const REPORT = { runs: [], chunks: new Map(), rows: {}, groups: [], tools: [], causes: [], stops: [] };

// Steps are recorded from 0 and shown from 1, as in the terminal: step 1 trains on the episodes of step 0.
const shownStep = (step) => step + 1;

const FLAGS = { repeated: 1, void: 2, nocall: 4, cut: 8, copied: 16, dropped: 32 };

const unpacked = new Map(); // block name -> promise of its value

const PER_BLOCK = 1000; // as in `html.py`
const blockOf = (number) => `c${Math.floor(number / PER_BLOCK)}`;
const piece = async (number, keep = true) => (await unpack(blockOf(number), keep))[number % PER_BLOCK];

function unpack(name, keep = true) {
  if (unpacked.has(name)) return unpacked.get(name);
  const value = (async () => {
    const block = document.getElementById(name);
    if (!block) throw new Error(`this file is not whole: block ${name} is missing`);
    const packed = block.textContent;
    const bytes = Uint8Array.fromBase64
      ? Uint8Array.fromBase64(packed)
      : Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  })();
  unpacked.set(name, value);
  if (!keep) forgetSome();
  return value;
}

// Tokens are large and looked at one step at a time: the blocks of the last few steps are kept.
const tokenBlocks = [];
function forgetSome() {
  const names = [...unpacked.keys()].filter((name) => tokenBlocks.includes(name));
  for (const name of names.slice(0, Math.max(0, names.length - 8))) unpacked.delete(name);
}

async function openReport() {
  const blocks = [...document.querySelectorAll('script[id^="lines"]')].map((block) => block.id);
  const [index, ...lines] = await Promise.all(["index", ...blocks].map((name) => unpack(name)));
  for (const name of blocks) unpacked.delete(name);
  Object.assign(REPORT, index);
  REPORT.prompts = []; // [prompt id, preview]
  REPORT.rows = { chunk: [], place: [] };
  REPORT.runs.forEach((run, number) => Object.assign(run, { number, chunks: [], sums: [], steps: [], measured: [], events: [] }));
  const questions = new Map();
  for (const line of lines.flat()) {
    const run = REPORT.runs[line.run];
    if (line.kind === "batch") addBatch(run, line, questions);
    else run[{ step: "steps", measured: "measured", event: "events" }[line.kind]].push(line);
  }
  REPORT.n = REPORT.rows.place.length;
  findGroups();
  return REPORT;
}

// The episodes of one step: its sums, and the rows that lists and filters go through.
function addBatch(run, line, questions) {
  run.sums.push(line.sums);
  if (!line.rows) return;
  const { mode, step, label, n } = line.sums;
  const chunk = { run: line.run, mode, step, label, n, texts: line.texts, tokens: line.tokens };
  run.chunks.push(chunk);
  REPORT.chunks.set(chunk.texts, chunk);
  tokenBlocks.push(blockOf(chunk.tokens));
  const places = line.questions.map(([name, preview]) => {
    if (!questions.has(name)) questions.set(name, REPORT.prompts.push([name, preview]) - 1);
    return questions.get(name);
  });
  line.rows.q = line.rows.q.map((place) => places[place]);
  line.rows.chunk = line.rows.n.map(() => chunk.texts);
  line.rows.place = line.rows.n.map((_, place) => place);
  for (const [name, column] of Object.entries(line.rows)) (REPORT.rows[name] ??= []).push(...column);
}

// A group: the episodes of one question in one step. Its rows stand together.
function findGroups() {
  const { chunk, g, n } = REPORT.rows;
  const found = new Map();
  for (let row = 0; row < REPORT.n; row++) {
    const key = `${chunk[row]}/${g[row] === null ? `alone${n[row]}` : g[row]}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(row);
  }
  REPORT.groupOf = new Array(REPORT.n);
  for (const rows of found.values()) {
    const at = REPORT.chunks.get(chunk[rows[0]]);
    const rewards = rows.map((row) => REPORT.rows.r[row]).filter((reward) => reward !== null);
    const group = {
      rows,
      at,
      g: g[rows[0]],
      q: REPORT.rows.q[rows[0]],
      mean: rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null,
      spread: rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0,
      ok: rows.filter((row) => REPORT.rows.ok[row]).length,
      scored: rows.filter((row) => REPORT.rows.ok[row] !== null).length, // the others were dropped
      calls: rows.reduce((sum, row) => sum + REPORT.rows.calls[row], 0) / rows.length,
      failed: rows.reduce((sum, row) => sum + REPORT.rows.failed[row], 0),
      gen: rows.reduce((sum, row) => sum + REPORT.rows.gen[row], 0) / rows.length,
    };
    group.dead = rows.length > 1 && group.spread <= 1e-6 && !rows.some((row) => REPORT.rows.a[row]);
    rows.forEach((row) => (REPORT.groupOf[row] = group));
    REPORT.groups.push(group);
  }
}

const atOf = (row) => REPORT.chunks.get(REPORT.rows.chunk[row]);
const previewOf = (row) => REPORT.prompts[REPORT.rows.q[row]][1];

// The share of rows that succeeded, of those that could be scored; null where none could.
function successOf(rows) {
  const scored = rows.filter((row) => REPORT.rows.ok[row] !== null);
  return scored.length ? scored.filter((row) => REPORT.rows.ok[row]).length / scored.length : null;
}

// What a page of a long run has not, as words behind a number; empty where it has all.
function inPart(runs) {
  const [shown, recorded] = ["shown", "recorded"].map((name) => runs.reduce((sum, run) => sum + run[name], 0));
  return shown < recorded ? ` (this page has ${shown.toLocaleString("en-US")} of ${plural(recorded, "recorded episode")})` : "";
}

function placeName(at, withRun = true) {
  const run = withRun && REPORT.runs.length > 1 ? `${REPORT.runs[at.run].name}, ` : "";
  if (at.mode === "heldout") return `${run}held out${at.label ? `, ${at.label}` : ""}`;
  if (at.mode === "eval") return `${run}${at.label?.startsWith("evaluation") ? at.label : `evaluation${at.step ? ` after step ${at.step}` : ""}`}`;
  return `${run}step ${shownStep(at.step)}`;
}

// The run of a row, where rows of both stand in one list.
const ofRun = (at, wanted) => (REPORT.runs.length > 1 && !wanted.run ? `${REPORT.runs[at.run].name}: ` : "");

// One episode with all its texts: what `episode_data.py` made of it, its prompt, and where it stands.
async function episodeOf(row) {
  const texts = await piece(REPORT.rows.chunk[row]);
  const episode = texts.episodes[REPORT.rows.place[row]];
  const prompt = texts.prompts[REPORT.prompts[REPORT.rows.q[row]][0]] || { m: [], row: {} };
  return { ...episode, row, at: atOf(row), prompt: episode.m || prompt.m, columns: prompt.row };
}

// The tokens of an episode: one object each. `sampled` ones have what the engine and the trainer said.
async function tokensOf(row) {
  const at = atOf(row);
  const [tokens, vocabulary, texts] = await Promise.all([
    piece(at.tokens, false),
    piece(REPORT.runs[at.run].vocabulary),
    piece(at.texts),
  ]);
  const own = tokens.episodes[REPORT.rows.place[row]];
  const episode = texts.episodes[REPORT.rows.place[row]];
  const name = REPORT.prompts[REPORT.rows.q[row]][0];
  const advantage = REPORT.rows.a[row];
  const all = [];
  let sampled = own.m.length > 0 ? 0 : 1;
  let left = own.m[0] ?? own.i.length;
  let run = 0;
  let place = 0; // among the sampled ones
  for (const id of own.i) {
    while (left === 0 && run + 1 < own.m.length) {
      run += 1;
      left = own.m[run];
      sampled = run % 2;
    }
    left -= 1;
    const token = { id, sampled: Boolean(sampled), index: all.length, ...tokenText(vocabulary, id) };
    if (sampled) {
      const lp = own.l[place];
      token.logprob = lp === null || lp === undefined ? null : lp / 1000;
      token.p = token.logprob === null ? null : Math.exp(token.logprob);
      token.difference = own.d ? own.d[place] : null;
      token.entropy = own.h ? own.h[place] : null;
      token.correction = own.k ? own.k[place] : null;
      token.turn = episode.turns.findIndex((turn) => token.index >= turn.st && token.index < turn.en);
      const ofTurn = token.turn >= 0 ? episode.turns[token.turn].ta : undefined; // where turns have their own
      token.advantage = ofTurn !== undefined ? ofTurn : own.ta ? own.ta[place] : advantage;
      token.weight = token.advantage === null || token.p === null ? null : token.advantage * (1 - token.p);
      place += 1;
    }
    all.push(token);
  }
  const promptIds = own.p || tokens.prompts[name] || [];
  return {
    prompt: promptIds.map((id) => ({ id, sampled: false, ...tokenText(vocabulary, id) })),
    tokens: all,
    seen: Boolean(own.d || own.h || own.k),
  };
}

function tokenText(vocabulary, id) {
  const known = vocabulary[id];
  if (known === undefined) return { text: `[${id}]` };
  return typeof known === "string" ? { text: known } : known;
}

// All texts of an episode as one lower-case string, for the search.
const searchable = new Map(); // chunk -> array by place

async function searchTexts(chunk) {
  if (!searchable.has(chunk)) {
    const texts = await piece(chunk);
    searchable.set(chunk, texts.episodes.map((episode) => textOf(episode, { ...texts.prompts[episode.q], ...(episode.m && { m: episode.m }) }).toLowerCase()));
  }
  return searchable.get(chunk);
}

function textOf(episode, prompt) {
  const parts = [];
  for (const message of (prompt && prompt.m) || []) parts.push(contentText(message.content));
  if (prompt && prompt.row && prompt.row.answer !== undefined) parts.push(contentText(prompt.row.answer));
  for (const turn of episode.turns || []) {
    if (turn.th) parts.push(turn.th);
    parts.push(turn.c);
    for (const attempt of turn.at || []) {
      parts.push(attempt.n || "", attempt.raw || JSON.stringify(attempt.a ?? ""));
    }
    for (const result of turn.re || []) parts.push(result.c, result.e || "");
    if (turn.u) parts.push(turn.u);
  }
  for (const message of episode.msgs || []) parts.push(contentText(message.content));
  for (const why of [episode.fail, episode.drop]) if (why) parts.push(why);
  return parts.join("\n");
}

function contentText(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content)) return content.map((part) => contentText(part.text ?? part)).join("\n");
  return JSON.stringify(content);
}

// The rows that a filter leaves. `wanted` has the words of the search's link: text, tool, cause, stop,
// ready, success, min, max, from, to, mode, run.
async function rowsOf(wanted, onProgress) {
  const { rows } = REPORT;
  const tool = wanted.tool ? REPORT.tools.indexOf(wanted.tool) : null;
  const cause = wanted.cause ? REPORT.causes.indexOf(wanted.cause) : null;
  const stop = wanted.stop ? REPORT.stops.indexOf(wanted.stop) : null;
  const [min, max] = [wanted.min, wanted.max].map((text) => (text === undefined || text === "" ? null : Number(text)));
  const [from, to] = [wanted.from, wanted.to].map((text) => (text ? Number(text) : null));
  const top = wanted.ready === "hack" ? topReward() : null;
  const found = [];
  for (let row = 0; row < REPORT.n; row++) {
    const at = atOf(row);
    if (wanted.run && String(at.run) !== wanted.run) continue;
    if (wanted.mode && at.mode !== wanted.mode) continue;
    if (from !== null && (at.mode !== "train" || shownStep(at.step) < from)) continue;
    if (to !== null && (at.mode !== "train" || shownStep(at.step) > to)) continue;
    if (tool !== null && (tool < 0 || !(rows.tools[row] & (1 << tool)))) continue;
    if (cause !== null && (cause < 0 || !(rows.causes[row] & (1 << cause)))) continue;
    if (stop !== null && rows.stop[row] !== stop) continue;
    if (wanted.success && rows.ok[row] !== (wanted.success === "yes" ? 1 : 0)) continue;
    if (min !== null && (rows.r[row] === null || !(rows.r[row] >= min))) continue;
    if (max !== null && (rows.r[row] === null || !(rows.r[row] <= max))) continue;
    if (wanted.q && REPORT.prompts[rows.q[row]][0] !== wanted.q) continue;
    if (wanted.ready && !isReady(wanted.ready, row, top)) continue;
    found.push(row);
  }
  const text = (wanted.text || "").trim().toLowerCase();
  if (!text) return found;
  const kept = [];
  const chunks = [...new Set(found.map((row) => rows.chunk[row]))];
  const texts = new Map();
  let done = 0;
  await Promise.all(
    chunks.map(async (chunk) => {
      texts.set(chunk, await searchTexts(chunk));
      done += 1;
      if (onProgress) onProgress(done, chunks.length);
    }),
  );
  for (const row of found) if (texts.get(rows.chunk[row])[rows.place[row]].includes(text)) kept.push(row);
  return kept;
}

function isReady(name, row, top) {
  const { rows } = REPORT;
  if (name in FLAGS) return Boolean(rows.flags[row] & FLAGS[name]);
  if (name === "hack") return rows.ok[row] === 0 && rows.r[row] !== null && rows.r[row] > 0 && rows.r[row] >= 0.5 * top;
  if (name === "failedcall") return rows.failed[row] > 0;
  if (name === "brokencall") return REPORT.broken.some((cause) => rows.causes[row] & (1 << REPORT.causes.indexOf(cause)) && REPORT.causes.includes(cause));
  if (name === "dead") return REPORT.groupOf[row].dead;
  if (name === "live") return REPORT.groupOf[row].rows.length > 1 && !REPORT.groupOf[row].dead;
  return true;
}

function topReward() {
  let top = 0;
  for (const reward of REPORT.rows.r) if (reward !== null && reward > top) top = reward;
  return top;
}
