"use strict";
// Draws the sections of the page: charts when they come into view, tables at once.

const DARK = window.matchMedia("(prefers-color-scheme: dark)");
const TOUCH = window.matchMedia("(hover: none)").matches;
const hiddenGroups = new Set();
const charts = [];
let DATA = {}, NUMBERS = [], GROUPS = []; // the sections, the columns of numbers that their charts refer to, the arms

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Decodes what html.py packed: a text, compressed, in base64.
async function unpack(name) {
  if (!window.DecompressionStream) throw new Error("This browser is too old for the page, whose data are compressed: " +
    "Chrome and Edge can read it since version 80, Safari since 16.4, Firefox since 113.");
  const bytes = Uint8Array.from(atob(document.getElementById(`pack-${name}`).textContent), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// The part of the address after # stores what the reader has chosen.
function state() { return new URLSearchParams(location.hash.slice(1)); }

function remember(changes) {
  const now = state();
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) now.delete(name); else now.set(name, value);
  }
  const text = now.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

function ink() {
  return DARK.matches ? { front: "#c9ced6", line: "#2c3037", limit: "#f0a469", card: "#1a1d22" } :
    { front: "#4a4e56", line: "#ececea", limit: "#9a3d00", card: "#ffffff" };
}

// Returns plotly's layout of a chart: axes, fonts and guides.
function layout(item) {
  const { front, line, limit, card } = ink();
  const axis = (label, log) => ({ title: { text: label, font: { size: 11 }, standoff: 6 }, type: log ? "log" : "linear",
    automargin: true, zeroline: false, gridcolor: line, linecolor: line, hoverformat: ".4g", tickformat: log ? "~g" : undefined,
    exponentformat: "power", minor: { showgrid: false } });
  const made = {
    dragmode: TOUCH ? false : "zoom", // a finger scrolls the page
    font: { color: front, size: 11, family: "inherit" }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { t: 8, r: 8, b: 36, l: 44 }, hovermode: !isCloud(item) ? "x unified" : "closest",
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: front } },
    xaxis: axis(item.x_label, item.log_x), yaxis: axis(item.y_label, item.log_y), showlegend: false, shapes: [],
  };
  if (item.log_x) Object.assign(made.xaxis, logarithmic(item, "x"));
  if (item.log_y) Object.assign(made.yaxis, logarithmic(item, "y"));
  if (item.x_names && item.x_names.length) {
    Object.assign(made.xaxis, { tickvals: item.x_names.map((_, i) => i), ticktext: item.x_names, range: [-0.3, item.x_names.length - 0.7] });
  }
  if (item.y_range) made.yaxis.range = item.log_y ? item.y_range.map(Math.log10) : item.y_range;
  for (const guide of item.guides || []) {
    const across = guide.x === null;
    const place = across ? { x0: 0, x1: 1, xref: "paper", y0: guide.y, y1: guide.y } :
      { y0: 0, y1: 1, yref: "paper", x0: guide.x, x1: guide.x };
    made.shapes.push({ type: "line", ...place, line: { color: guide.is_broken ? limit : front, width: 1, dash: "dot" },
      label: { text: guide.text, font: { size: 10, color: guide.is_broken ? limit : front }, textposition: "start", yanchor: "bottom" } });
  }
  return made;
}

// Returns the ticks of a logarithmic axis: powers of ten, 2 and 5 between few of them, round numbers within less than one.
function logarithmic(item, axis) {
  const columns = axis === "x" ? ["x"] : ["y", "low", "high"];
  const values = item.series.flatMap((one) => columns.flatMap((name) => (one[name] === null ? [] : NUMBERS[one[name]])))
    .filter((one) => one > 0);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0);
  const width = Math.log10(high / low);
  if (!(width < 1.5)) return { dtick: Math.ceil(width / 6) };
  if (width > 0.9) return { dtick: "D2" };
  const raw = (high - low) / 6 || low / 2, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw), ticks = [];
  for (let tick = Math.floor(low / step) * step; tick <= high + step; tick += step) if (tick > 0) ticks.push(Number(tick.toPrecision(6)));
  return { tickmode: "array", tickvals: ticks, ticktext: ticks.map((one) => (one < 1e-4 ? one.toExponential() : String(one))) };
}

function isCloud(item) { return item.series.every((one) => one.style === "points"); }

// Draws a band as closed polygons, one for each stretch without a gap.
function band(series, x, low, high) {
  const xs = [], ys = [];
  for (let begin = 0; begin < x.length; begin++) {
    let end = begin;
    while (end < x.length && low[end] !== null && high[end] !== null) end++;
    if (end === begin) continue;
    for (let i = begin; i < end; i++) { xs.push(x[i]); ys.push(high[i]); }
    for (let i = end - 1; i >= begin; i--) { xs.push(x[i]); ys.push(low[i]); }
    xs.push(null); ys.push(null);
    begin = end;
  }
  return { x: xs, y: ys, type: "scatter", mode: "lines", fill: "toself", fillcolor: series.color + "2b",
    line: { width: 0 }, hoverinfo: "skip", connectgaps: false };
}

// Mixes a quarter of white into a color, for a black page.
function lighter(color) {
  return `#${[1, 3, 5].map((at) => Math.round(parseInt(color.slice(at, at + 2), 16) * 0.75 + 64).toString(16).padStart(2, "0")).join("")}`;
}

// Returns plotly's traces of a chart: first the bands, then the lines over them.
function traces(item) {
  const bands = [], lines = [], toned = (color) => (DARK.matches ? lighter(color) : color);
  const modes = { line: "lines", points: "markers", both: "lines+markers" };
  for (const series of item.series) {
    if (hiddenGroups.has(series.group)) continue;
    const [x, y, low, high] = ["x", "y", "low", "high"].map((name) => (series[name] === null ? null : NUMBERS[series[name]]));
    if (low && high) bands.push(band(series, x, low, high));
    lines.push({ x, y, type: "scatter", mode: modes[series.style], name: series.name.replace(/</g, "&lt;"),
      line: { color: toned(series.color), dash: series.dash, width: 1.8 },
      marker: { color: toned(series.color), size: 5, opacity: series.style === "points" ? 0.7 : 1 },
      customdata: low && high ? x.map((_, i) => [low[i], high[i]]) : undefined,
      hovertemplate: low && high ? "%{y} <i>(%{customdata[0]:.3g} to %{customdata[1]:.3g})</i>" : undefined });
  }
  return [...bands, ...lines];
}

function draw(place) {
  const item = place.item;
  Plotly.react(place, traces(item), layout(item),
    { displaylogo: false, responsive: true, displayModeBar: TOUCH ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  place.drawn = true;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }
}, { rootMargin: "400px" });

function redraw() {
  for (const place of document.querySelectorAll(".plot")) if (place.drawn) draw(place);
}

function swatch(color, dash) {
  const made = element("span", `swatch ${dash}`);
  made.style.setProperty("--color", color);
  return made;
}

// Makes the figure of a table; columns of numbers are aligned to the right.
function table(item) {
  const made = element("figure", "table"), body = element("table", item.columns.length > 3 ? "wide" : "");
  const scroll = element("div", "scroll");
  made.append(element("figcaption", "", item.title), scroll);
  scroll.tabIndex = 0; // for those who scroll with keys
  scroll.setAttribute("role", "group");
  scroll.setAttribute("aria-label", item.title);
  body.setAttribute("role", "table"); // a narrow window lays it out as blocks, which would be no table
  scroll.append(body);
  const isNumber = item.columns.map((_, i) => item.rows.every((row) => /^(-|[-+]?[\d.,]+( ?%|e[-+]?\d+)?( of \d+)?)$/.test(row[i])));
  const head = body.createTHead().insertRow();
  for (const [i, name] of item.columns.entries()) {
    const cell = element(name ? "th" : "td", isNumber[i] ? "number" : "", name);
    cell.setAttribute("role", "columnheader");
    head.append(cell);
  }
  const rows = body.createTBody();
  for (const cells of item.rows) {
    const row = rows.insertRow();
    row.setAttribute("role", "row");
    for (const [i, text] of cells.entries()) {
      const verdict = item.columns[i] === "verdict" && text.length < 20;
      const cell = element("td", isNumber[i] ? "number" : verdict ? `verdict ${text}` : "", text);
      cell.setAttribute("role", "cell");
      cell.dataset.head = item.columns[i];
      row.append(cell);
    }
  }
  return made;
}

// Makes the figure of a chart, with a legend unless the buttons of the arms name all its lines; `seen` draws it later.
function chart(item) {
  const made = element("figure", item.kind), place = element("div", "plot");
  place.item = item;
  place.setAttribute("role", "group"); // with buttons inside, so it is no image
  place.setAttribute("aria-label", [item.title, item.note].filter(Boolean).join(". "));
  made.append(element("figcaption", "", item.title), place);
  const byGroup = GROUPS.length > 1 && item.series.every((one) => one.name === one.group);
  const isAlone = item.series.length < 2 && (!item.series[0] || item.series[0].name === item.series[0].group);
  if (!byGroup && !isAlone) {
    const legend = element("div", "legend");
    for (const series of item.series) {
      const entry = element("span");
      entry.append(swatch(series.color, series.dash), series.name);
      legend.append(entry);
    }
    made.append(legend);
  }
  charts.push(place);
  return made;
}

// Returns the name and the color of each arm.
function groups() {
  const series = DATA.sections.flatMap((section) => section.items).flatMap((item) => item.series || []);
  return [...new Map(series.filter((one) => one.group && one.dash === "solid").map((one) => [one.group, one.color]))];
}

// Makes the buttons that show or hide an arm in all charts.
function groupButtons() {
  const box = document.getElementById("groups");
  box.hidden = GROUPS.length < 2;
  for (const name of (state().get("hidden") || "").split("|").filter(Boolean)) hiddenGroups.add(name);
  for (const [name, color] of GROUPS) {
    const button = element("button");
    button.append(swatch(color, "solid"), name);
    button.setAttribute("aria-pressed", String(!hiddenGroups.has(name)));
    button.addEventListener("click", () => {
      if (!hiddenGroups.delete(name)) hiddenGroups.add(name);
      button.setAttribute("aria-pressed", String(!hiddenGroups.has(name)));
      remember({ hidden: [...hiddenGroups].join("|") });
      redraw();
    });
    box.append(button);
  }
}

function addToContents(title, target) {
  const link = element("a", "", title);
  link.href = `#${target.id}`;
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the part after # stores what was chosen
    for (const fold of target.querySelectorAll("details")) fold.open = true;
    target.scrollIntoView();
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
  });
  document.getElementById("contents").append(link);
  target.link = link;
}

function sections() {
  for (const [number, section] of DATA.sections.entries()) {
    const made = element("section"), items = element("div", "items");
    made.id = `section-${number}`;
    const title = element("h2", "", section.title), inside = [element("p", "intro", section.intro), items];
    if (section.folded) {
      const fold = element("details"), head = element("summary");
      head.append(title, element("span", "", `${section.items.length} ${section.items.length === 1 ? "item" : "items"}`));
      fold.append(head, ...inside);
      made.append(fold);
    } else made.append(title, ...inside);
    for (const item of section.items) {
      const figure = item.kind === "table" ? table(item) : chart(item);
      figure.dataset.name = item.title.toLowerCase();
      if (item.note) figure.append(element("p", "note", item.note));
      items.append(figure);
    }
    document.getElementById("sections").append(made);
    addToContents(section.title, made);
  }
  if (document.getElementById("tokens")) addToContents("Tokens", document.getElementById("tokens"));
}

// Marks the section that the reader looks at.
function followReading() {
  const all = [...document.querySelectorAll("section")];
  let asked = false;
  const mark = () => {
    asked = false;
    const reading = all.filter((one) => !one.hidden && one.getBoundingClientRect().top < innerHeight / 3).pop() || all[0];
    for (const one of all) if (one === reading) one.link.setAttribute("aria-current", "true"); else one.link.removeAttribute("aria-current");
  };
  addEventListener("scroll", () => { if (!asked) { asked = true; requestAnimationFrame(mark); } }, { passive: true });
  if (all.length) mark();
}

// Shows only the charts and tables whose title contains what the reader types.
function findCharts() {
  const input = document.getElementById("wanted");
  const show = () => {
    const wanted = input.value.trim().toLowerCase();
    let found = false;
    for (const section of document.querySelectorAll("#sections section")) {
      let any = false;
      for (const figure of section.querySelectorAll("figure")) {
        figure.hidden = !figure.dataset.name.includes(wanted);
        any ||= !figure.hidden;
      }
      section.hidden = !any;
      found ||= any;
      for (const fold of section.querySelectorAll("details")) fold.open = wanted !== "";
    }
    document.getElementById("sections").classList.toggle("none", !found);
    remember({ find: wanted });
  };
  input.value = state().get("find") || "";
  input.addEventListener("input", show);
  if (input.value) show();
}

function show(data) {
  DATA = data;
  NUMBERS = data.numbers;
  GROUPS = groups();
  groupButtons();
  sections();
  followReading();
  findCharts();
  for (const place of charts) seen.observe(place);
  DARK.addEventListener("change", redraw);
}

async function showPage() {
  const [plotly, page] = await Promise.all(["plotly", "page"].map(unpack));
  document.head.append(element("script", "", plotly)); // runs at once
  show(JSON.parse(page));
}

const shownPage = showPage();
shownPage.catch((error) => document.querySelector("main").prepend(element("p", "failed", error.message)));
