// The token inspector: its data, and which row holds which tokens. All rows have one height and only rows in view have
// elements, so the list scrolls smoothly with any number of tokens.

const ROW = 24, BEYOND = 12, PROMPT_ROWS = 4; // height of a row in pixels, rows rendered beyond both edges, most rows of a prompt
const HEAD = 0, PROMPT = 1, TEXT = 2, GAP = 3; // kinds of rows
const at = (id) => document.getElementById(id);
const list = at("list"), rowsBox = at("rows");
const packs = new Map(); // unpacked packs, the newest last
const view = { data: null, raw: null, words: null, order: [], rows: null, drawn: new Map(), current: -1, hovered: -1,
  coloring: "acceptance" };

// Returns the content of a pack; at most 12 packs stay unpacked.
async function unpacked(name) {
  if (!packs.has(name)) packs.set(name, unpack(name).then(JSON.parse));
  if (packs.size > 12) packs.delete(packs.keys().next().value);
  return packs.get(name);
}

// ---- The visible form of a token's text

const SIGNS = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·" };

// Returns a token's text with visible signs for white space and control characters.
function shown(text) {
  if (text === "") return "∅";
  if (/^\s+$/.test(text)) return [...text].map((one) => SIGNS[one] || "·").join("");
  return text.replace(/[\n\t\r]/g, (one) => SIGNS[one])
    .replace(/[\u0000-\u001f\u007f]/g, (one) => String.fromCharCode(one === "\u007f" ? 0x2421 : 0x2400 + one.charCodeAt(0)));
}

function cells(text) { // counts character cells; wide characters take two
  let count = 0;
  for (const one of text) count += one.codePointAt(0) >= 0x1100 && /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f000}-\u{3ffff}]/u.test(one) ? 2 : 1;
  return count;
}

// Returns the text of a token id in all its forms, and its width in character cells.
function word(id) {
  if (!view.words.has(id)) {
    const raw = view.raw[id] ?? `#${id}`, text = shown(raw);
    view.words.set(id, { raw, text, cells: cells(text), ends: raw.includes("\n") });
  }
  return view.words.get(id);
}

// ---- Data of one saved iteration

// Adds to the columns of an iteration, once, what the rows need: where each response starts, and facts about each.
function prepared(data) {
  if (data.starts) return data;
  const count = data.lengths.length, starts = new Int32Array(count + 1);
  data.responseOf = new Int32Array(data.id.length);
  data.rejectedCount = new Int32Array(count);
  data.sampledCount = new Int32Array(count);
  data.largestRatio = new Float64Array(count);
  data.search = data.prompt.map((prompt) => `${prompt}\n`);
  data.mostAdvantage = 0;
  for (let r = 0; r < count; r++) {
    starts[r + 1] = starts[r] + data.lengths[r];
    for (let k = starts[r]; k < starts[r + 1]; k++) {
      data.responseOf[k] = r;
      data.search[r] += word(data.id[k]).raw;
      data.mostAdvantage = Math.max(data.mostAdvantage, Math.abs(data.advantage[k] || 0));
      if (!data.sampled[k]) continue;
      data.sampledCount[r]++;
      data.rejectedCount[r] += data.accepted[k] === 0;
      data.largestRatio[r] = Math.max(data.largestRatio[r], data.ratio[k] || 0);
    }
  }
  data.mostAdvantage ||= 1;
  data.search = data.search.map((text) => text.toLowerCase());
  data.starts = starts;
  return data;
}

function rejectedShare(data, r) { return data.rejectedCount[r] / Math.max(1, data.sampledCount[r]); }

// ---- Choice and order of the responses

// Sets view.order, the responses that pass the filters in the chosen order, and view.place, their indices there.
function choose() {
  const data = view.data, verdict = at("verdict").value, text = at("text").value.toLowerCase();
  const least = at("least").value === "" ? -Infinity : Number(at("least").value);
  const most = at("most").value === "" ? Infinity : Number(at("most").value);
  const rejected = at("rejected").value === "" ? -1 : Number(at("rejected").value);
  const order = [];
  for (let r = 0; r < data.lengths.length; r++) {
    if (verdict && data.correct[r] !== (verdict === "right")) continue;
    if (data.reward[r] < least || data.reward[r] > most || rejectedShare(data, r) <= rejected) continue;
    if (text && !data.search[r].includes(text)) continue;
    order.push(r);
  }
  const by = { reward: (r) => -data.reward[r], "-reward": (r) => data.reward[r], rejected: (r) => -rejectedShare(data, r),
    ratio: (r) => -data.largestRatio[r] }[at("sort").value];
  if (by) order.sort((a, b) => by(a) - by(b) || a - b);
  view.order = order;
  view.place = new Int32Array(data.lengths.length).fill(-1);
  order.forEach((r, place) => { view.place[r] = place; });
}

// ---- Rows: kind, response, and the tokens, letters or parts of a heading from `from` to `to`

// What stands above a response: texts and how they look.
function heading(data, r) {
  const verdict = data.correct[r];
  return [
    verdict === null ? ["", ""] : verdict ? ["✓ right", "right"] : ["✗ wrong", "wrong"],
    [`reward ${data.reward[r]}`, ""],
    [data.answer[r] ? `right answer ${data.answer[r].slice(0, 40)}` : "", ""],
    [`${data.lengths[r]} tokens`, ""],
    [`${data.rejectedCount[r]} rejected`, ""],
    [data.finish[r] === "stop" ? "" : `ended by ${data.finish[r]}`, ""],
    [data.uid[r], ""],
  ].filter(([text]) => text);
}

// Returns a function that measures a text of a heading in pixels, with the space after it.
function headingWidth() {
  const pen = document.createElement("canvas").getContext("2d"), probe = element("div", "row head");
  rowsBox.append(probe);
  const style = getComputedStyle(probe), space = parseFloat(style.columnGap);
  pen.font = `600 ${style.fontSize} ${style.fontFamily}`;
  probe.remove();
  return (text) => pen.measureText(text).width + space;
}

// Returns the width of a character cell in pixels.
function cellWidth() {
  const probe = element("span", "t", "0".repeat(100));
  rowsBox.append(probe);
  const width = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return width || 8;
}

// Divides the chosen responses into rows that fit the window, and stores the rows in view.rows, column by column.
function layRows() {
  const data = view.data, width = rowsBox.clientWidth - 4, cell = cellWidth(), wideOf = headingWidth(), kind = [], response = [], from = [], to = [];
  const add = (...row) => [kind, response, from, to].forEach((column, i) => column.push(row[i]));
  view.firstRow = new Int32Array(view.order.length);
  for (const [place, r] of view.order.entries()) {
    view.firstRow[place] = kind.length;
    let part = 0, filled = 0;
    for (const [next, [text]] of heading(data, r).entries()) {
      const wide = wideOf(text);
      if (filled && filled + wide > width) { add(HEAD, r, part, next); part = next; filled = 0; }
      filled += wide;
    }
    add(HEAD, r, part, heading(data, r).length);
    const letters = Math.max(8, Math.floor(width / cell)), prompt = shownPrompt(data, r);
    for (let row = 0; row < PROMPT_ROWS && row * letters < prompt.length; row++) add(PROMPT, r, row * letters, (row + 1) * letters);
    let begin = data.starts[r], used = 0;
    for (let k = begin; k < data.starts[r + 1]; k++) {
      const one = word(data.id[k]), wide = one.cells * cell + 2;
      if (used && used + wide > width) { add(TEXT, r, begin, k); begin = k; used = 0; }
      used += wide;
      if (one.ends) { add(TEXT, r, begin, k + 1); begin = k + 1; used = 0; }
    }
    if (begin < data.starts[r + 1]) add(TEXT, r, begin, data.starts[r + 1]);
    add(GAP, r, 0, 0);
  }
  view.rows = { kind: Uint8Array.from(kind), response: Int32Array.from(response), from: Int32Array.from(from), to: Int32Array.from(to) };
  view.laidFor = list.clientWidth;
  rowsBox.style.height = `${kind.length * ROW}px`;
}

function shownPrompt(data, r) { return data.prompt[r].replace(/\n/g, "⏎"); }
