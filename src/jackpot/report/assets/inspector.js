// The token inspector. All rows are equally high and only those in view have elements, so any number of tokens is fluid.

const ROW = 24, BEYOND = 12, PROMPT_ROWS = 4; // pixels, rows rendered beyond both edges, rows of a prompt at most
const HEAD = 0, PROMPT = 1, TEXT = 2, GAP = 3; // kinds of rows
const at = (id) => document.getElementById(id);
const list = at("list"), rowsBox = at("rows");
const packs = new Map(); // unpacked ones, the newest last
const view = { data: null, raw: null, words: null, order: [], rows: null, drawn: new Map(), current: -1, hovered: -1,
  colouring: "acceptance" };

async function unpacked(name) {
  if (!packs.has(name)) packs.set(name, unpack(name));
  if (packs.size > 12) packs.delete(packs.keys().next().value);
  return packs.get(name);
}

// ---- What is shown of a token's text

const SIGNS = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·" };

function shown(text) {
  if (text === "") return "∅";
  if (/^\s+$/.test(text)) return [...text].map((one) => SIGNS[one] || "·").join("");
  return text.replace(/[\n\t\r]/g, (one) => SIGNS[one])
    .replace(/[\u0000-\u001f\u007f]/g, (one) => String.fromCharCode(one === "\u007f" ? 0x2421 : 0x2400 + one.charCodeAt(0)));
}

function cells(text) { // wide characters take two
  let count = 0;
  for (const one of text) count += one.codePointAt(0) >= 0x1100 && /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f000}-\u{3ffff}]/u.test(one) ? 2 : 1;
  return count;
}

function word(id) {
  if (!view.words.has(id)) {
    const raw = view.raw[id] ?? `#${id}`, text = shown(raw);
    view.words.set(id, { raw, text, cells: cells(text), ends: raw.includes("\n") });
  }
  return view.words.get(id);
}

// ---- Data of one saved iteration

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

// ---- Which responses, in which order

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

// ---- Rows: kind, response, and the tokens or letters from `from` to `to`

function cellWidth() {
  const probe = element("span", "t", "0".repeat(100));
  rowsBox.append(probe);
  const width = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return width || 8;
}

function layRows() {
  const data = view.data, width = rowsBox.clientWidth - 4, cell = cellWidth(), kind = [], response = [], from = [], to = [];
  const add = (...row) => [kind, response, from, to].forEach((column, i) => column.push(row[i]));
  view.firstRow = new Int32Array(view.order.length);
  for (const [place, r] of view.order.entries()) {
    view.firstRow[place] = kind.length;
    add(HEAD, r, 0, 0);
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

// ---- Elements of the rows in view

function render() {
  if (!view.rows) return;
  const count = view.rows.kind.length;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - BEYOND);
  const last = Math.min(count, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + BEYOND);
  for (const [row, made] of view.drawn) if (row < first || row >= last) { made.remove(); view.drawn.delete(row); }
  const fresh = document.createDocumentFragment();
  for (let row = first; row < last; row++) {
    if (view.drawn.has(row)) continue;
    const made = makeRow(row);
    view.drawn.set(row, made);
    fresh.append(made);
  }
  rowsBox.append(fresh);
  markCurrent();
}

function makeRow(row) {
  const { kind, response, from, to } = view.rows, data = view.data, r = response[row];
  const made = element("div", ["row head", "row prompt", "row", "row"][kind[row]]);
  made.style.top = `${row * ROW}px`;
  made.setAttribute("role", "presentation");
  if (kind[row] === HEAD) made.append(...heading(data, r));
  if (kind[row] === PROMPT) {
    const prompt = shownPrompt(data, r), cut = to[row] < prompt.length && from[row] / (to[row] - from[row]) === PROMPT_ROWS - 1;
    made.textContent = cut ? `${prompt.slice(from[row], to[row] - 1)}…` : prompt.slice(from[row], to[row]);
  }
  if (kind[row] === TEXT) for (let k = from[row]; k < to[row]; k++) made.append(makeToken(data, k));
  return made;
}

function heading(data, r) {
  const count = data.rejectedCount[r];
  return [
    element("span", data.correct[r] ? "right" : "wrong", data.correct[r] ? "✓ right" : "✗ wrong"),
    element("span", "", `reward ${data.reward[r]}`),
    element("span", "", `${data.lengths[r]} tokens`),
    element("span", "", `${count} rejected`),
    element("span", "", data.finish[r] === "stop" ? "" : `ended by ${data.finish[r]}`),
    element("span", "", data.uid[r]),
  ].filter((one) => one.textContent);
}

function makeToken(data, k) {
  const one = word(data.id[k]), made = element("span", "t", one.text);
  made.dataset.k = k;
  made.id = `t${k}`;
  made.setAttribute("role", "option");
  made.setAttribute("aria-selected", "false");
  if (!data.sampled[k]) made.classList.add("tool");
  else if (data.accepted[k] === 0) {
    made.classList.add("rejected");
    made.setAttribute("aria-label", `${one.text}, rejected`);
  }
  paint(made, k);
  return made;
}

function paint(made, k) {
  const data = view.data, mode = COLOURINGS[view.colouring], value = data[mode.column][k];
  if (!data.sampled[k] || value === null) { made.style.background = made.style.color = ""; return; }
  const colour = colourAt(mode.place(value, data.mostAdvantage), DARK.matches ? "dark" : "light");
  made.style.background = `rgb(${colour})`;
  made.style.color = inkOn(colour);
}

function repaint() {
  for (const made of rowsBox.querySelectorAll(".t")) paint(made, Number(made.dataset.k));
}

function legend() {
  const mode = COLOURINGS[view.colouring], theme = DARK.matches ? "dark" : "light", most = view.data.mostAdvantage;
  const ticks = mode.ticks(most), places = ticks.map((value) => mode.place(value, most));
  const low = Math.min(...places), high = Math.max(...places), stops = [];
  for (let i = 0; i <= 20; i++) stops.push(`rgb(${colourAt(low + (high - low) * i / 20, theme)}) ${i * 5}%`);
  const bar = element("div", "bar");
  bar.style.background = `linear-gradient(to right, ${stops})`;
  const labels = ticks.map((value, i) => {
    const end = mode.ends && (places[i] === low ? low < 0 : places[i] === high);
    const label = element("span", "", `${end ? (places[i] === low ? "≤ " : "≥ ") : ""}${Number(value.toPrecision(3))}`);
    label.style.left = `${100 * (places[i] - low) / (high - low)}%`;
    return label;
  });
  at("scale").replaceChildren(bar, ...labels);
  at("scale").title = mode.says;
  for (const button of at("colouring").children) {
    const chosen = button.dataset.colouring === view.colouring;
    button.setAttribute("aria-checked", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
}

function colourBy(name) {
  view.colouring = name;
  repaint();
  legend();
  remember({ colour: name === "acceptance" ? "" : name });
}

// ---- The panel

function detail(k) {
  const box = at("detail");
  if (k < 0) { box.replaceChildren(element("p", "note", "Point at a token, or choose one with the keys.")); return; }
  const data = view.data, r = data.responseOf[k], one = word(data.id[k]), sampled = data.sampled[k];
  const rejected = sampled && data.accepted[k] === 0, kept = data.accepted[k];
  const fact = !sampled ? "written by a tool, not learnt from" : rejected ? "rejected" : kept < 1 ? `kept with the share ${kept}` : "accepted";
  const parts = [element("h3", "", one.text), element("div", `state ${rejected ? "rejected" : ""}`, fact)];
  parts[1].dataset.field = "state";
  parts.push(pairs([["token id", data.id[k], "id"], ["position", `${k - data.starts[r] + 1} of ${data.lengths[r]}`, "position"]]));
  if (sampled) {
    parts.push(element("h4", "", "Log-probability"), models(data, k));
    parts.push(element("h4", "", "Correction"), pairs(["ratio", "acceptance", "z", "weight", "kl", "advantage"].map((name) =>
      [{ z: "Z", kl: "KL(rollout model ‖ policy)" }[name] || name, data[name][k], name])));
    parts.push(element("h4", "", `Most probable tokens: the first ${data.rollout_top_count} of ${data.rollout_top_of} captured`), tops(data, k));
  } else parts.push(pairs([["advantage", data.advantage[k], "advantage"]]));
  parts.push(element("h4", "", "Written by"), pairs([
    ["policy's optimizer steps", data.policy_version[k], "policy_version"],
    ["rollout model's optimizer steps", data.rollout_model_version[k], "rollout_model_version"]]));
  parts.push(element("h4", "", "Response"), pairs([["reward", data.reward[r], "reward"], ["judged", data.correct[r] ? "right" : "wrong", "correct"],
    ["right answer", data.answer[r], "answer"], ["ended by", data.finish[r], "finish"], ["uid", data.uid[r], "uid"]]));
  parts.push(element("h4", "", "Prompt"), element("div", "prompt", data.prompt[r]));
  box.replaceChildren(...parts);
}

function number(value) { return value === null || value === undefined ? "-" : String(value); }

function pairs(rows) {
  const made = element("table");
  for (const [name, value, field] of rows) {
    const row = made.insertRow(), cell = element("td", "", number(value));
    row.append(element("td", "", name), cell);
    cell.dataset.field = field;
    if (typeof value === "number") cell.className = "number";
  }
  return made;
}

function models(data, k) {
  const made = element("table"), head = made.createTHead().insertRow();
  for (const name of ["", "log p", "p"]) head.append(element("th", name ? "number" : "", name));
  for (const [name, column] of [["rollout model, as it wrote", "rollout"], ["rollout model, in training", "rescored"],
    ["policy, when the batch came", "old"], ["policy, at its first update", "current"]]) {
    const row = made.insertRow(), value = data[column][k], cell = element("td", "number", number(value));
    cell.dataset.field = column;
    row.append(element("td", "", name), cell, element("td", "number", value === null ? "-" : percent(Math.exp(value))));
  }
  return made;
}

function percent(share) { return share >= 0.001 ? `${Number((100 * share).toPrecision(3))} %` : share === 0 ? "0 %" : share.toExponential(1); }

// Both models' most probable tokens side by side; the drawn one is bold.
function tops(data, k) {
  const found = new Map();
  for (const model of ["rollout", "policy"]) {
    const count = data[`${model}_top_count`];
    for (let i = 0; i < count; i++) {
      const id = data[`${model}_top_ids`][k * count + i], value = data[`${model}_top`][k * count + i];
      if (!found.has(id)) found.set(id, {});
      found.get(id)[model] = value;
    }
  }
  const drawn = found.get(data.id[k]) || {};
  found.set(data.id[k], { rollout: drawn.rollout ?? Math.exp(data.rollout[k]), policy: drawn.policy ?? Math.exp(data.current[k]) });
  const rows = [...found].sort(([, a], [, b]) => Math.max(b.rollout ?? 0, b.policy ?? 0) - Math.max(a.rollout ?? 0, a.policy ?? 0));
  const made = element("table"), head = made.createTHead().insertRow();
  made.dataset.field = "top";
  for (const name of ["token", "rollout model", "policy"]) head.append(element("th", name === "token" ? "" : "number", name));
  for (const [id, values] of rows) {
    const row = made.insertRow();
    row.className = id === data.id[k] ? "drawn" : "";
    row.append(element("td", "word", word(id).text));
    for (const model of ["rollout", "policy"]) {
      const known = values[model] !== undefined && values[model] !== null;
      const cell = element("td", "number", known ? percent(values[model]) : "-"), meter = element("span", "meter");
      meter.style.setProperty("--share", `${100 * (values[model] || 0)}%`);
      cell.append(meter);
      row.append(cell);
    }
  }
  const box = element("div");
  box.append(made, element("p", "note", "- : not among these of that model. The policy's are those of its first update on the response."));
  return box;
}

// ---- The chosen token

function markCurrent() {
  for (const made of rowsBox.querySelectorAll('[aria-selected="true"]')) if (Number(made.dataset.k) !== view.current) made.setAttribute("aria-selected", "false");
  const made = at(`t${view.current}`);
  if (made) { made.setAttribute("aria-selected", "true"); list.setAttribute("aria-activedescendant", made.id); }
  else list.removeAttribute("aria-activedescendant");
}

function rowOf(k) {
  const { kind, from, to } = view.rows, place = view.place[view.data.responseOf[k]];
  for (let row = view.firstRow[place]; row < kind.length && kind[row] !== GAP; row++) if (kind[row] === TEXT && k >= from[row] && k < to[row]) return row;
  return view.firstRow[place];
}

function setCurrent(k, isKey = true) {
  view.current = k;
  view.hovered = -1;
  if (k >= 0 && isKey) {
    const row = rowOf(k), head = view.firstRow[view.place[view.data.responseOf[k]]];
    const top = (row - head < 8 ? head : row - 1) * ROW, bottom = (row + 2) * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    render();
  } else markCurrent();
  detail(k);
  const r = k < 0 ? -1 : view.data.responseOf[k];
  remember({ token: k < 0 ? "" : `${r}.${k - view.data.starts[r]}` });
}

function firstToken(place) {
  for (let p = place; p >= 0 && p < view.order.length; p++) if (view.data.lengths[view.order[p]]) return view.data.starts[view.order[p]];
  return -1;
}

function stepResponse(by) {
  if (!view.order.length) return;
  const here = view.current < 0 ? (by > 0 ? -1 : 1) : view.place[view.data.responseOf[view.current]];
  const k = firstToken(Math.max(0, Math.min(view.order.length - 1, here + by)));
  if (k >= 0) setCurrent(k);
}

// The tokens behind or before one, in the order of the page.
function* tokensFrom(k, by) {
  const { data, order, place } = view, start = k < 0 ? (by > 0 ? 0 : order.length - 1) : place[data.responseOf[k]];
  for (let p = start; p >= 0 && p < order.length; p += by) {
    const first = data.starts[order[p]], end = data.starts[order[p] + 1];
    let one = k >= 0 && p === start ? k + by : by > 0 ? first : end - 1;
    for (; one >= first && one < end; one += by) yield one;
  }
}

function stepToken(by, wanted = () => true) {
  for (const k of tokensFrom(view.current, by)) if (wanted(k)) { setCurrent(k); return; }
}

function isRejected(k) { return view.data.sampled[k] && view.data.accepted[k] === 0; }

// ---- Loading and filtering

function chosenRun() { return DATA.tokens.runs[Number(at("run").value)] || DATA.tokens.runs[0]; }

function fillIterations(wanted) {
  const run = chosenRun();
  at("iteration").replaceChildren(...run.iterations.map((one) => new Option(one.iteration, one.pack)));
  const same = run.iterations.find((one) => String(one.iteration) === String(wanted)) || run.iterations[run.iterations.length - 1];
  at("iteration").value = same.pack;
}

async function load(token) {
  const run = chosenRun(), pack = at("iteration").value;
  const [raw, data] = await Promise.all([unpacked(run.words), unpacked(pack)]);
  if (at("iteration").value !== pack || chosenRun() !== run) return; // another one was chosen meanwhile
  Object.assign(view, { raw, words: new Map() });
  view.data = prepared(data);
  const [r, position] = (token || "").split(".").map(Number);
  view.current = token && data.starts[r] + position < data.starts[r + 1] ? data.starts[r] + position : -1;
  list.scrollTop = 0;
  legend();
  filter();
  if (view.current >= 0) setCurrent(view.current);
}

function filter() {
  const data = view.data;
  if (!data) return;
  choose();
  if (view.current >= 0 && view.place[data.responseOf[view.current]] < 0) view.current = -1;
  relay();
  detail(view.current);
  const one = chosenRun().iterations.find((those) => those.pack === at("iteration").value), say = (value) => value.toLocaleString("en");
  const whole = one.responses === one.of_responses ? "all" : `${say(one.responses)} of ${say(one.of_responses)}`;
  at("count").textContent = `${say(view.order.length)} of ${say(one.responses)} responses match. This page has ${whole} responses and ` +
    `${say(one.tokens)} of ${say(one.of_tokens)} tokens that were saved at iteration ${one.iteration}.`;
  remember({ run: at("run").value === "0" ? "" : at("run").value, iteration: one.iteration, ...Object.fromEntries(
    ["verdict", "least", "most", "rejected", "sort", "text"].map((id) => [id, at(id).value])) });
}

function relay() {
  for (const made of view.drawn.values()) made.remove();
  view.drawn.clear();
  layRows();
  render();
}

function restore() {
  const now = state();
  at("run").value = now.get("run") || "0";
  if (at("run").selectedIndex < 0) at("run").value = "0";
  for (const id of ["verdict", "least", "most", "rejected", "sort", "text"]) at(id).value = now.get(id) || "";
  view.colouring = COLOURINGS[now.get("colour")] ? now.get("colour") : "acceptance";
  fillIterations(now.get("iteration"));
  return load(now.get("token"));
}

// ---- What the reader does

function pressed(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && !at("keys").open) { if (typing) list.focus(); else setCurrent(-1); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || at("keys").open || !view.data) return;
  const box = at("tokens").getBoundingClientRect(), inView = box.top < innerHeight && box.bottom > 0;
  const inList = document.activeElement === list, names = Object.keys(COLOURINGS);
  const always = { "?": () => at("keys").showModal(), "/": () => at("text").focus(), j: () => stepResponse(1), k: () => stepResponse(-1),
    n: () => stepToken(1, isRejected), N: () => stepToken(-1, isRejected), "[": () => stepIteration(-1), "]": () => stepIteration(1) };
  const arrows = { ArrowDown: () => stepResponse(1), ArrowUp: () => stepResponse(-1), ArrowRight: () => stepToken(1), ArrowLeft: () => stepToken(-1),
    Home: () => setCurrent(firstToken(0)), End: () => setCurrent(firstToken(view.order.length - 1)) };
  names.forEach((name, i) => { always[String(i + 1)] = () => colourBy(name); });
  const act = (inView && always[event.key]) || (inList && arrows[event.key]);
  if (act) { event.preventDefault(); act(); }
}

function stepIteration(by) {
  const select = at("iteration"), wanted = select.selectedIndex + by;
  if (wanted < 0 || wanted >= select.options.length) return;
  select.selectedIndex = wanted;
  load();
}

function begin() {
  at("run").replaceChildren(...DATA.tokens.runs.map((run, i) => new Option(run.name, i)));
  at("colouring").replaceChildren(...Object.entries(COLOURINGS).map(([name, mode]) => {
    const button = element("button", "", mode.title);
    button.type = "button";
    button.dataset.colouring = name;
    button.title = mode.says;
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => colourBy(name));
    return button;
  }));
  at("colouring").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...at("colouring").children];
    if (!by) return;
    const next = all[(all.indexOf(document.activeElement) + by + all.length) % all.length];
    colourBy(next.dataset.colouring);
    next.focus();
    event.stopPropagation();
  });
  at("run").addEventListener("change", () => { fillIterations(at("iteration").selectedOptions[0].text); load(); });
  at("iteration").addEventListener("change", () => load());
  for (const id of ["verdict", "least", "most", "rejected", "sort", "text"]) at(id).addEventListener("input", () => { list.scrollTop = 0; filter(); });
  at("ask").addEventListener("click", () => at("keys").showModal());
  let asked = false;
  list.addEventListener("scroll", () => { if (!asked) { asked = true; requestAnimationFrame(() => { asked = false; render(); }); } }, { passive: true });
  list.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".t");
    if (token && Number(token.dataset.k) !== view.hovered) { view.hovered = Number(token.dataset.k); detail(view.hovered); }
  });
  list.addEventListener("pointerleave", () => { if (view.hovered !== view.current) { view.hovered = -1; detail(view.current); } });
  list.addEventListener("click", (event) => { const token = event.target.closest(".t"); if (token) setCurrent(Number(token.dataset.k), false); });
  document.addEventListener("keydown", pressed);
  addEventListener("hashchange", restore);
  DARK.addEventListener("change", () => { if (view.data) { repaint(); legend(); } });
  new ResizeObserver(() => { if (view.data && list.clientWidth !== view.laidFor) { const k = view.current; relay(); if (k >= 0) setCurrent(k); } }).observe(list);
  restore();
}

begin();
