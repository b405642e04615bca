// The token inspector: rows in view, the chosen token, loading, filters and keys.

// ---- Elements of the rows in view

// Makes the elements of the rows that came into view, and removes those of the rows that left it.
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
  if (kind[row] === HEAD) {
    made.classList.toggle("first", !from[row]);
    made.append(...heading(data, r).slice(from[row], to[row]).map(([text, look]) => element("span", look, text)));
  }
  if (kind[row] === PROMPT) {
    const prompt = shownPrompt(data, r), cut = to[row] < prompt.length && from[row] / (to[row] - from[row]) === PROMPT_ROWS - 1;
    made.textContent = cut ? `${prompt.slice(from[row], to[row] - 1)}…` : prompt.slice(from[row], to[row]);
  }
  if (kind[row] === TEXT) for (let k = from[row]; k < to[row]; k++) made.append(makeToken(data, k));
  return made;
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

// Colors the element of token k by the chosen quantity.
function paint(made, k) {
  const data = view.data, mode = COLORINGS[view.coloring], value = data[mode.column][k];
  if (!data.sampled[k] || value === null) { made.style.background = made.style.color = ""; return; }
  const color = colorAt(mode.place(value, data.mostAdvantage), DARK.matches ? "dark" : "light");
  made.style.background = `rgb(${color})`;
  made.style.color = inkOn(color);
}

function repaint() {
  for (const made of rowsBox.querySelectorAll(".t")) paint(made, Number(made.dataset.k));
}

// Draws the color scale of the chosen quantity with its numbers, and marks the chosen button.
function legend() {
  const mode = COLORINGS[view.coloring], theme = DARK.matches ? "dark" : "light", most = view.data.mostAdvantage;
  const ticks = mode.ticks(most), places = ticks.map((value) => mode.place(value, most));
  const low = Math.min(...places), high = Math.max(...places), stops = [];
  for (let i = 0; i <= 20; i++) stops.push(`rgb(${colorAt(low + (high - low) * i / 20, theme)}) ${i * 5}%`);
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
  for (const button of at("coloring").children) {
    const chosen = button.dataset.coloring === view.coloring;
    button.setAttribute("aria-checked", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
}

function colorBy(name) {
  view.coloring = name;
  repaint();
  legend();
  remember({ color: name === "acceptance" ? "" : name });
}

// ---- The chosen token

// Marks the element of the chosen token, if it is in view.
function markCurrent() {
  for (const made of rowsBox.querySelectorAll('[aria-selected="true"]')) if (Number(made.dataset.k) !== view.current) made.setAttribute("aria-selected", "false");
  const made = at(`t${view.current}`);
  if (made) { made.setAttribute("aria-selected", "true"); list.setAttribute("aria-activedescendant", made.id); }
  else list.removeAttribute("aria-activedescendant");
}

// Returns the row that token k is in.
function rowOf(k) {
  const { kind, from, to } = view.rows, place = view.place[view.data.responseOf[k]];
  for (let row = view.firstRow[place]; row < kind.length && kind[row] !== GAP; row++) if (kind[row] === TEXT && k >= from[row] && k < to[row]) return row;
  return view.firstRow[place];
}

// Chooses token k, or none if k is -1; after a key, the list scrolls to the token.
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

// Returns the first token of the first response from `place` on that has any; -1 if there is none.
function firstToken(place) {
  for (let p = place; p >= 0 && p < view.order.length; p++) if (view.data.lengths[view.order[p]]) return view.data.starts[view.order[p]];
  return -1;
}

// Chooses the first token of the next response, or of the one before.
function stepResponse(by) {
  if (!view.order.length) return;
  const here = view.current < 0 ? (by > 0 ? -1 : 1) : view.place[view.data.responseOf[view.current]];
  const k = firstToken(Math.max(0, Math.min(view.order.length - 1, here + by)));
  if (k >= 0) setCurrent(k);
}

// Yields the tokens after or before a token, in the order of the page.
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

// Lists the iterations of the chosen run, and chooses the wanted one, else the last.
function fillIterations(wanted) {
  const run = chosenRun();
  at("iteration").replaceChildren(...run.iterations.map((one) => new Option(`${one.iteration}${one.best ? " (best)" : ""}`, one.pack)));
  const same = run.iterations.find((one) => one.iteration === parseInt(wanted, 10)) || run.iterations[run.iterations.length - 1];
  at("iteration").value = same.pack;
}

async function load(token) {
  const run = chosenRun(), pack = at("iteration").value;
  const [raw, data] = await Promise.all([unpacked(run.words), unpacked(pack)]);
  if (at("iteration").value !== pack || chosenRun() !== run) return; // the reader has chosen another one meanwhile
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
  list.classList.toggle("none", !view.order.length);
  if (view.current >= 0 && view.place[data.responseOf[view.current]] < 0) view.current = -1;
  relay();
  detail(view.current);
  const one = chosenRun().iterations.find((those) => those.pack === at("iteration").value), say = (value) => value.toLocaleString("en");
  const whole = one.responses === one.of_responses ? "all" : `${say(one.responses)} of ${say(one.of_responses)}`;
  at("count").textContent = `${say(view.order.length)} of ${say(one.responses)} responses match. This page carries ${whole} responses and ` +
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
  view.coloring = COLORINGS[now.get("color")] ? now.get("color") : "acceptance";
  fillIterations(now.get("iteration"));
  return load(now.get("token"));
}

// ---- Input of the reader

function pressed(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && !at("keys").open) { if (typing) list.focus(); else setCurrent(-1); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || at("keys").open || !view.data) return;
  const box = at("tokens").getBoundingClientRect(), inView = box.top < innerHeight && box.bottom > 0;
  const inList = document.activeElement === list, names = Object.keys(COLORINGS);
  const always = { "?": () => at("keys").showModal(), "/": () => at("text").focus(), j: () => stepResponse(1), k: () => stepResponse(-1),
    n: () => stepToken(1, isRejected), N: () => stepToken(-1, isRejected), "[": () => stepIteration(-1), "]": () => stepIteration(1) };
  const arrows = { ArrowDown: () => stepResponse(1), ArrowUp: () => stepResponse(-1), ArrowRight: () => stepToken(1), ArrowLeft: () => stepToken(-1),
    Home: () => setCurrent(firstToken(0)), End: () => setCurrent(firstToken(view.order.length - 1)) };
  names.forEach((name, i) => { always[String(i + 1)] = () => colorBy(name); });
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
  at("coloring").replaceChildren(...Object.entries(COLORINGS).map(([name, mode]) => {
    const button = element("button", "", mode.title);
    button.type = "button";
    button.dataset.coloring = name;
    button.title = mode.says;
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => colorBy(name));
    return button;
  }));
  at("coloring").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...at("coloring").children];
    if (!by) return;
    const next = all[(all.indexOf(document.activeElement) + by + all.length) % all.length];
    colorBy(next.dataset.coloring);
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
  list.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (!token) return;
    setCurrent(Number(token.dataset.k), false);
    if (at("detail").offsetTop > list.offsetTop) at("detail").scrollIntoView({ block: "nearest" }); // the panel is below
  });
  document.addEventListener("keydown", pressed);
  addEventListener("hashchange", restore);
  DARK.addEventListener("change", () => { if (view.data) { repaint(); legend(); } });
  new ResizeObserver(() => { if (view.data && list.clientWidth !== view.laidFor) { const k = view.current; relay(); if (k >= 0) setCurrent(k); } }).observe(list);
  restore();
}

shownPage.then(begin);
