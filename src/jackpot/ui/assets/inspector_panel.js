// Everything that is known of one token.

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
      [{ z: "Z", kl: "KL(rollout model ‖ policy)", weight: "weight, where accepted" }[name] || name, data[name][k], name])));
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
    cell.className = "value";
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
