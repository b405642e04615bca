// Maps a number to a color. A scale runs from the color of the page (nothing to see) to orange, or from blue through the
// color of the page to orange: color-blind people distinguish them by lightness and by blue against orange.

const SCALES = {
  light: { blue: ["#ffffff", "#cfe1f2", "#7fb2d9", "#2f7ab8", "#0b4a84"], orange: ["#ffffff", "#fde3c8", "#f9b572", "#e2751d", "#97430a"] },
  dark: { blue: ["#1a1d22", "#1d3850", "#235d8c", "#3f8fcb", "#9bd0f7"], orange: ["#1a1d22", "#4a2f17", "#8a4a12", "#cf7420", "#ffc078"] },
};

function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }

// `place` from -1 (blue) over 0 (nothing) to 1 (orange).
function colorAt(place, theme) {
  const stops = SCALES[theme][place < 0 ? "blue" : "orange"], along = Math.min(1, Math.abs(place)) * (stops.length - 1);
  const from = Math.min(stops.length - 2, Math.floor(along)), share = along - from;
  const low = rgb(stops[from]), high = rgb(stops[from + 1]);
  return low.map((one, i) => Math.round(one + (high[i] - one) * share));
}

function luminance(color) {
  const [r, g, b] = color.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white, whichever is read more easily; one of them always has a contrast above 4.5.
function inkOn(color) {
  const light = luminance(color);
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

function clip(value) { return Math.max(-1, Math.min(1, value)); }

// The quantities that can color tokens: `place` of a value on the scale, the values in the legend, the explanation.
const COLORINGS = {
  acceptance: { title: "Acceptance", column: "acceptance", place: (value) => 1 - value, ticks: () => [1, 0.75, 0.5, 0.25, 0],
    says: "probability that the token is accepted" },
  weight: { title: "Weight", column: "weight", place: (value) => (value > 0 ? clip(Math.log2(value) / 2) : -1),
    ticks: () => [0.25, 0.5, 1, 2, 4], ends: true, says: "factor on the gradient of an accepted token" },
  ratio: { title: "Ratio", column: "ratio", place: (value) => (value > 0 ? clip(Math.log10(value)) : -1),
    ticks: () => [0.1, 0.3, 1, 3, 10], ends: true, says: "p of the policy / p of the rollout model" },
  advantage: { title: "Advantage", column: "advantage", place: (value, most) => clip(value / most),
    ticks: (most) => [-most, -most / 2, 0, most / 2, most], says: "advantage of the token: training makes it less likely below 0, more likely above 0" },
  kl: { title: "KL", column: "kl", place: (value) => clip(Math.sqrt(Math.max(0, value) / 2)), ticks: () => [0, 0.1, 0.5, 1, 2],
    ends: true, says: "KL(rollout model ‖ policy) at the token's position, in nats" },
};
