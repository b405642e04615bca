"use strict";
// Draws the sections of the page. Charts are drawn when they come into view.

const DARK = window.matchMedia("(prefers-color-scheme: dark)");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function axis(label, log) {
  return { title: { text: label }, type: log ? "log" : "linear", automargin: true, zeroline: false };
}

function layout(item) {
  const front = DARK.matches ? "#e6e6e6" : "#1b1b1b", line = DARK.matches ? "#3a3d44" : "#d9d9d9";
  const made = {
    title: { text: item.title, font: { size: 14 } },
    font: { color: front, size: 11 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { t: 40, r: 10, b: 45, l: 55 }, height: 320, hovermode: "x unified",
    xaxis: { ...axis(item.x_label, item.log_x), gridcolor: line },
    yaxis: { ...axis(item.y_label, item.log_y), gridcolor: line },
    legend: { orientation: "h", y: -0.25 }, shapes: [], annotations: [],
  };
  if (item.y_range) made.yaxis.range = item.log_y ? item.y_range.map(Math.log10) : item.y_range;
  for (const guide of item.guides || []) {
    const across = guide.x === null;
    const place = across ? { x0: 0, x1: 1, xref: "paper", y0: guide.y, y1: guide.y } :
      { y0: 0, y1: 1, yref: "paper", x0: guide.x, x1: guide.x };
    made.shapes.push({ type: "line", ...place, line: { color: front, width: 1, dash: "dot" },
      label: { text: guide.text, font: { size: 10 }, textposition: "end" } });
  }
  return made;
}

function traces(item) {
  if (item.kind === "heatmap") {
    return [{ type: "heatmap", x: item.x, y: item.y, z: item.values, colorscale: "Cividis",
      colorbar: { title: { text: item.value_label, side: "right" } } }];
  }
  const drawn = [];
  for (const series of item.series) {
    if (series.low && series.high) {
      const edge = { x: series.x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip",
        showlegend: false, legendgroup: series.name };
      drawn.push({ ...edge, y: series.low });
      drawn.push({ ...edge, y: series.high, fill: "tonexty", fillcolor: series.colour + "2e" });
    }
    const modes = { line: "lines", points: "markers", both: "lines+markers" };
    drawn.push({ x: series.x, y: series.y, type: "scatter", mode: modes[series.style], name: series.name,
      legendgroup: series.name, line: { color: series.colour, dash: series.dash, width: 2 },
      marker: { color: series.colour, size: 5 } });
  }
  return drawn;
}

function draw(place, item) {
  Plotly.react(place, traces(item), layout(item), { displaylogo: false, responsive: true });
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { draw(entry.target, entry.target.item); seen.unobserve(entry.target); entry.target.drawn = true; }
  }
}, { rootMargin: "300px" });

function table(item) {
  const made = element("figure", undefined, "table"), body = element("table");
  made.append(element("figcaption", item.title), body);
  const head = body.createTHead().insertRow();
  for (const name of item.columns) head.append(element("th", name));
  const rows = body.createTBody();
  for (const cells of item.rows) {
    const row = rows.insertRow();
    for (const cell of cells) row.insertCell().textContent = cell;
  }
  return made;
}

function chart(item) {
  const made = element("figure"), place = element("div", undefined, "chart");
  place.item = item;
  made.append(place);
  seen.observe(place);
  return made;
}

for (const [number, section] of JSON.parse(document.getElementById("data").textContent).entries()) {
  const made = element("section"), items = element("div", undefined, "items");
  made.id = `section-${number}`;
  made.append(element("h2", section.title), element("p", section.intro, "intro"), items);
  for (const item of section.items) {
    const figure = item.kind === "table" ? table(item) : chart(item);
    if (item.note) figure.append(element("p", item.note, "note"));
    items.append(figure);
  }
  document.getElementById("sections").append(made);
  const link = element("a", section.title);
  link.href = `#${made.id}`;
  document.getElementById("contents").append(link, " ");
}

DARK.addEventListener("change", () => {
  for (const place of document.querySelectorAll(".chart")) if (place.drawn) draw(place, place.item);
});
