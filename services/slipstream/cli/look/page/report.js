"use strict";
// Draws the report from the JSON in #data. Text from the run goes in as text nodes only, never as HTML.
const D = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const css = (name) => `var(${name})`;

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function s(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
}

// ------------------------------------------------------------------------------------------------ numbers
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = (value) => (value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0) + " %";

function short(value) {
  const size = Math.abs(value);
  if (value === null || value === undefined) return "–";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + " k";
  if (size >= 100 || Number.isInteger(value)) return whole.format(value);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.01 || size === 0) return value.toFixed(3);
  return value.toExponential(1);
}

const axis = (value) => (Math.abs(value) < 100 && Math.abs(value) >= 0.001 ? String(+value.toPrecision(4)) : short(value));

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * base).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// ------------------------------------------------------------------------------------------------- charts
function legend(series) {
  if (series.length < 2) return null;
  return h("div", { class: "legend" }, series.map((each) => h("span", {}, h("i", { style: { background: each.colour, opacity: each.faint ? 0.45 : 1 } }), each.name)));
}

function lineChart(series, options = {}) {
  const W = options.wide ? 1060 : 500, H = options.wide ? 250 : 200, L = 46, R = 10, T = 8, B = 24;
  series.forEach((each, index) => (each.colour = each.colour || css(COLOURS[index % COLOURS.length])));
  const points = series.flatMap((each) => each.points.filter((p) => p[1] !== null));
  if (!points.length) return h("div", { class: "lead" }, "Nothing to show yet.");
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const x0 = Math.min(...xs), x1 = Math.max(x0 + 1, ...xs);
  let y0 = options.low ?? Math.min(...ys), y1 = options.high ?? Math.max(...ys);
  if (options.mark !== undefined) y1 = Math.max(y1, options.mark);
  if (y1 <= y0) y1 = y0 + (Math.abs(y0) || 1);
  if (options.high === undefined) y1 += (y1 - y0) * 0.06;
  const X = (value) => L + ((value - x0) / (x1 - x0)) * (W - L - R);
  const Y = (value) => T + (1 - (Math.min(Math.max(value, y0), y1) - y0) / (y1 - y0)) * (H - T - B);
  const svg = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": options.label || "chart" });
  for (const tick of ticks(y0, y1, 4)) {
    svg.append(s("line", { x1: L, x2: W - R, y1: Y(tick), y2: Y(tick), stroke: css("--grid") }));
    svg.append(s("text", { x: L - 7, y: Y(tick) + 4, "text-anchor": "end" }, options.percent ? percent(tick) : axis(tick)));
  }
  for (const tick of ticks(x0, x1, options.wide ? 9 : 5)) svg.append(s("text", { x: X(tick), y: H - 6, "text-anchor": "middle" }, short(tick)));
  if (options.mark !== undefined) {
    svg.append(s("line", { x1: L, x2: W - R, y1: Y(options.mark), y2: Y(options.mark), stroke: css("--bad"), "stroke-dasharray": "5 4", "stroke-opacity": 0.7 }));
    svg.append(s("text", { x: W - R, y: Y(options.mark) - 4, "text-anchor": "end" }, options.markName || ""));
  }
  for (const each of series) {
    const kept = each.points.filter((p) => p[1] !== null);
    const path = kept.map((p, at) => `${at ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    if (each.fill && kept.length > 1) svg.append(s("path", { d: `${path}L${X(kept[kept.length - 1][0])} ${Y(y0)}L${X(kept[0][0])} ${Y(y0)}Z`, fill: each.colour, "fill-opacity": 0.1 }));
    svg.append(s("path", { d: path, fill: "none", stroke: each.colour, "stroke-width": each.dots ? 1.4 : 1.8, "stroke-linejoin": "round", "stroke-opacity": each.faint ? 0.45 : 1 }));
    if (each.dots || kept.length === 1) kept.forEach((p) => svg.append(s("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3.2, fill: each.colour })));
  }
  const cross = s("line", { y1: T, y2: H - B, stroke: css("--faint"), "stroke-opacity": 0, "stroke-dasharray": "3 3" });
  svg.append(cross);
  const tip = h("div", { class: "tip" });
  const box = h("div", { class: "chart" }, svg, tip);
  const move = (event) => {
    const frame = svg.getBoundingClientRect();
    const at = x0 + (((event.clientX - frame.left) / frame.width) * W - L) / (W - L - R) * (x1 - x0);
    const near = [...new Set(xs)].reduce((best, value) => (Math.abs(value - at) < Math.abs(best - at) ? value : best));
    cross.setAttribute("x1", X(near)); cross.setAttribute("x2", X(near)); cross.setAttribute("stroke-opacity", 0.8);
    const rows = series.map((each) => [each.name, each.points.find((p) => p[0] === near)]).filter((row) => row[1] && row[1][1] !== null);
    tip.replaceChildren(h("div", {}, `${options.x || "step"} ${short(near)}`), ...rows.map(([name, p]) => h("div", {}, `${name}  ${options.percent ? percent(p[1]) : short(p[1])}`)));
    const left = (X(near) / W) * frame.width;
    Object.assign(tip.style, { opacity: 1, top: "0px", left: left > frame.width * 0.6 ? "auto" : `${left + 12}px`, right: left > frame.width * 0.6 ? `${frame.width - left + 12}px` : "auto" });
  };
  box.addEventListener("pointermove", move);
  box.addEventListener("pointerleave", () => { tip.style.opacity = 0; cross.setAttribute("stroke-opacity", 0); });
  return h("div", {}, box, legend(series));
}

function histogram(groups, labels, options = {}) {
  const W = 500, H = 200, L = 46, R = 8, T = 8, B = 24;
  groups.forEach((each, index) => (each.colour = each.colour || css(COLOURS[index])));
  const shares = groups.map((each) => { const total = each.counts.reduce((a, b) => a + b, 0) || 1; return each.counts.map((count) => count / total); });
  const top = Math.max(0.001, ...shares.flat()) * 1.08;
  const svg = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": options.label || "histogram" });
  const Y = (value) => T + (1 - value / top) * (H - T - B);
  for (const tick of ticks(0, top, 4)) {
    svg.append(s("line", { x1: L, x2: W - R, y1: Y(tick), y2: Y(tick), stroke: css("--grid") }), s("text", { x: L - 7, y: Y(tick) + 4, "text-anchor": "end" }, percent(tick)));
  }
  const slot = (W - L - R) / labels.length, bar = (slot * 0.78) / groups.length;
  const every = Math.ceil(labels.length / 9);
  labels.forEach((label, at) => {
    if (at % every === 0) svg.append(s("text", { x: L + slot * (at + 0.5), y: H - 6, "text-anchor": "middle" }, label));
    groups.forEach((each, g) => {
      const y = Y(shares[g][at]);
      svg.append(s("rect", { x: L + slot * at + slot * 0.11 + bar * g, y, width: Math.max(1, bar - 0.6), height: Math.max(0, H - B - y), rx: 2, fill: options.shade ? options.shade(at) : each.colour },
        s("title", {}, `${label}: ${percent(shares[g][at])} (${whole.format(each.counts[at])})`)));
    });
  });
  return h("div", { class: "chart" }, svg, legend(groups));
}

function strip(parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  parts.forEach((part, index) => (part.colour = part.colour || css(COLOURS[index % COLOURS.length])));
  return h("div", {},
    h("div", { class: "strip" }, parts.map((part) => h("div", { title: `${part.name}: ${percent(part.value / total)}`, style: { flexGrow: part.value, background: part.colour } }))),
    h("div", { class: "legend" }, parts.map((part) => h("span", {}, h("i", { style: { background: part.colour } }), `${part.name} ${percent(part.value / total)}`))));
}

function bars(rows) {
  return h("div", { class: "bars" }, rows.flatMap((row) => [
    h("span", {}, row.name),
    h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${Math.min(100, row.share * 100)}%`, background: row.colour || css("--accent") } })),
    h("span", { class: "num" }, row.text)]));
}

// ------------------------------------------------------------------------------------------------ sections
const main = document.getElementById("main"), nav = document.getElementById("nav");

function section(id, title, lead, ...children) {
  nav.append(h("a", { href: `#${id}` }, title));
  main.append(h("section", { id }, h("h2", {}, title), lead ? h("p", { class: "lead" }, lead) : null, ...children));
}

const card = (title, ...children) => h("div", { class: "card" }, h("h3", {}, title), ...children);
const curve = (name) => D.series.step.map((step, at) => [step, D.series[name] ? D.series[name][at] : null]);
const has = (name) => D.series[name] && D.series[name].some((value) => value !== null);

function smooth(points) {
  const kept = points.filter((p) => p[1] !== null), width = Math.max(1, Math.round(kept.length / 12));
  return kept.map((p, at) => { const near = kept.slice(Math.max(0, at - width + 1), at + 1); return [p[0], near.reduce((sum, q) => sum + q[1], 0) / near.length]; });
}

function overview() {
  section("overview", "Overview", D.lead, h("div", { class: "tiles" }, D.tiles.map((tile) =>
    h("div", { class: "card tile" }, h("div", { class: "label" }, tile.label), h("div", { class: `value ${tile.tone || ""}` }, tile.value), h("div", { class: "note" }, tile.note || "")))));
}

function learning() {
  if (!D.series.step.length) return;
  const unit = D.unit_rewards ? { low: 0, high: 1 } : {};
  const rewards = curve("reward");
  const top = card("Reward", lineChart([{ name: "each step", points: rewards, faint: true, colour: css("--c1") }, { name: "smoothed", points: smooth(rewards), colour: css("--c1") },
    ...Object.entries(D.evaluations).map(([name, points], at) => ({ name: `${name}, greedy`, points, dots: true, colour: css(COLOURS[1 + (at % 5)]) }))], { wide: true, label: "Reward per step", ...unit }));
  top.classList.add("wide");
  const grid = h("div", { class: "grid" }, top, card("Completion length, tokens", lineChart([{ name: "mean", points: curve("length"), fill: true }], { low: 0, label: "Length per step" })));
  const names = Object.keys(D.components);
  if (names.length > 1) grid.append(card("Rewards by component", lineChart(names.map((name) => ({ name, points: D.series.step.map((step, at) => [step, D.components[name][at] ?? null]) })), { label: "Rewards" })));
  grid.append(card("Groups without a signal, cut-off completions", lineChart([{ name: "all rewards equal", points: curve("zero_variance") }, { name: "cut off", points: curve("truncated") }], { low: 0, high: 1, percent: true, label: "Shares" })));
  if (has("entropy")) grid.append(card("Entropy, nats a token", lineChart([{ name: "entropy", points: curve("entropy"), fill: true }], { low: 0, label: "Entropy" })));
  grid.append(card("Gradient norm", lineChart([{ name: "before clipping", points: curve("gradient_norm"), colour: css("--c3") }], { low: 0, label: "Gradient norm" })));
  section("learning", "Does it learn", "Reward of the prompts trained on, and greedy accuracy on prompts held out, where a point belongs to exactly one version.", grid);
}

function staleness() {
  if (!D.series.step.length) return;
  const grid = h("div", { class: "grid" });
  grid.append(card("Age of the groups' oldest tokens, updates", lineChart([{ name: "mean", points: curve("age_mean") }, { name: "max", points: curve("age_max"), faint: true }], { low: 0, mark: D.bound, markName: `bound ${D.bound}`, label: "Age" })));
  grid.append(card("Tokens by age", histogram([{ name: "tokens", counts: D.ages.counts }], D.ages.labels, { label: "Tokens by age", shade: (at) => (D.ages.values[at] > D.bound ? css("--bad") : css("--c1")) })));
  grid.append(card("Completion lengths", histogram(D.lengths.groups, D.lengths.labels, { label: "Lengths" })));
  if (has("ess")) grid.append(card("Effective sample size, share of tokens", lineChart([{ name: "effective", points: curve("ess"), fill: true }], { low: 0, high: 1, percent: true, label: "Effective sample size" })));
  if (has("k3")) grid.append(card("Mismatch of sampler and learner, nats a token", lineChart([{ name: "k3", points: curve("k3"), colour: css("--c2") }], { low: 0, label: "Mismatch" })));
  if (has("clip")) grid.append(card("Tokens clipped, tokens without weight", lineChart([{ name: "clipped", points: curve("clip") }, { name: "no weight", points: curve("masked") }], { low: 0, percent: true, label: "Clipping" })));
  section("staleness", "Is it sound", "How old the tokens were that it learned from, and how far the sampler was from the policy it trained.", grid);
}

function speed() {
  if (!D.series.step.length) return;
  const grid = h("div", { class: "grid" });
  grid.append(card("Where the learner's time went", strip(D.parts)));
  if (D.stages.length) grid.append(card("Load of each stage", bars(D.stages.map((each) => ({ name: each.name, share: each.load, text: `${percent(each.load)} · ${each.seconds.toFixed(2)} s a step`, colour: each.limits ? css("--c2") : css("--c1") }))), h("p", { class: "lead", style: { margin: "12px 0 0", fontSize: "13.5px" } }, D.limit)));
  grid.append(card("Tokens trained a second", lineChart([{ name: "tokens/s", points: curve("tokens_per_second"), fill: true }], { low: 0, label: "Tokens a second" })));
  grid.append(card("Seconds a step", lineChart([{ name: "waiting", points: curve("wait") }, { name: "all", points: curve("seconds") }], { low: 0, label: "Seconds" })));
  section("speed", "Where the time went", "A stage's load is the share of the time in which it worked; the largest one is what limits the run.", grid);
}

function ledger() {
  const E = D.equation;
  if (!E.terms) { section("ledger", "Every group accounted for", E.missing); return; }
  const rows = E.terms.map((term) => h("tr", {}, h("td", {}, term.name), h("td", { class: "num" }, whole.format(term.groups)), h("td", { class: "num" }, whole.format(term.tokens)), h("td", {}, term.reasons)));
  const verdict = E.problems.length ? h("p", { class: "bad" }, `The equation does not hold: ${E.problems.join("; ")}`) : h("p", { class: "good" }, "The equation holds, recounted from every record of the ledger.");
  section("ledger", "Every group accounted for", "Issued = in flight + scored + buffered + trained + dropped + failed, from the ledger alone.",
    h("div", { class: "card" }, strip(E.terms.filter((term) => term.groups).map((term) => ({ name: term.name, value: term.groups }))),
      h("table", {}, h("tr", {}, h("th", {}, "state"), h("th", { class: "num" }, "groups"), h("th", { class: "num" }, "tokens"), h("th", {}, "reasons")),
        rows, h("tr", {}, h("td", {}, h("b", {}, "issued")), h("td", { class: "num" }, h("b", {}, whole.format(E.issued))), h("td", { class: "num" }, h("b", {}, whole.format(E.tokens))), h("td", {}, ""))), verdict));
}

// -------------------------------------------------------------------------------------------------- samples
function shade(kind, token) {
  if (kind === "version") {
    const share = D.bound ? Math.min(1, token.age / (D.bound + 1)) : Math.min(1, token.age);
    return token.age > D.bound ? "color-mix(in srgb, var(--bad) 30%, transparent)" : token.age ? `color-mix(in srgb, var(--c3) ${Math.round(12 + 38 * share)}%, transparent)` : "color-mix(in srgb, var(--c4) 20%, transparent)";
  }
  if (kind === "gap" && token.gap !== null) return `color-mix(in srgb, ${token.gap > 0 ? "var(--c4)" : "var(--c2)"} ${Math.round(Math.min(1, Math.abs(token.gap) / 0.7) * 75)}%, transparent)`;
  if (kind === "surprise" && token.logprob !== null) return `color-mix(in srgb, var(--c5) ${Math.round(Math.min(1, -token.logprob / 4) * 62)}%, transparent)`;
  return "none";
}

const visible = (text) => text.replace(/\n/g, "⏎\n");

function completion(sample, version, kind) {
  if (!sample.tokens) return h("div", { class: "completion" }, sample.text);
  const versions = sample.versions.flatMap(([value, count]) => Array(count).fill(value));
  return h("div", { class: "completion" }, sample.tokens.map((text, at) => {
    const token = { age: version - versions[at], gap: sample.gap ? sample.gap[at] : null, logprob: sample.logprobs ? sample.logprobs[at] : null };
    const facts = [`version ${versions[at]}, age ${token.age}`, token.logprob === null ? "" : `sampler ${token.logprob.toFixed(3)}`, token.gap === null ? "the learner did not score it" : `learner ${token.gap >= 0 ? "+" : ""}${token.gap.toFixed(3)}`];
    return h("span", { title: facts.filter(Boolean).join("\n"), style: { background: shade(kind, token) } }, visible(text));
  }));
}

function oneSample(sample, version, kind) {
  const reward = sample.reward === null ? h("b", { class: "bad" }, `unscored: ${sample.unscored}`) : h("b", {}, `reward ${short(sample.reward)}`);
  const parts = Object.entries(sample.components || {});
  return h("div", { class: "one" }, h("div", { class: "facts" }, reward, ...(parts.length > 1 ? parts.map(([name, value]) => h("span", {}, `${name} ${value === null ? "–" : short(value)}`)) : []),
    h("span", {}, `${whole.format(sample.length)} tokens`), h("span", {}, sample.finish === "length" ? h("span", { class: "warm" }, "cut off") : sample.finish)),
    completion(sample, version, kind), sample.omitted ? h("div", { class: "facts" }, `… ${whole.format(sample.omitted)} tokens in the middle are left out`) : null);
}

function samples() {
  const all = [...D.samples.map((each) => ({ ...each, kind: "trained" })), ...D.dropped.map((each) => ({ ...each, kind: each.reason }))];
  if (!all.length) { section("samples", "Samples", "None were kept (telemetry.samples_per_step)."); return; }
  let placed = false, kind = "version", filter = "all", current = all.filter((each) => each.kind === "trained").pop() || all[0];
  const list = h("div", { class: "list" }), detail = h("div", { class: "card" }), modes = h("div", { class: "seg" }), kinds = h("div", { class: "seg" }), key = h("span", {});
  const best = (each) => Math.max(...each.samples.map((sample) => sample.reward ?? -Infinity));
  const keys = { version: "green: fresh; violet: older; red: over the bound", gap: "green: the learner finds the token likelier than the sampler did; orange: less likely", surprise: "pink: unlikely for the sampler", none: "" };
  function draw() {
    key.textContent = keys[kind];
    modes.replaceChildren(...["version", "gap", "surprise", "none"].map((each) => h("button", { type: "button", "aria-pressed": each === kind, onclick: () => { kind = each; draw(); } }, each)));
    const names = ["all", ...new Set(all.map((each) => each.kind))];
    kinds.replaceChildren(...names.map((each) => h("button", { type: "button", "aria-pressed": each === filter, onclick: () => { filter = each; draw(); } }, each)));
    const shown = all.filter((each) => filter === "all" || each.kind === filter);
    if (!shown.includes(current)) current = shown[shown.length - 1];
    const place = list.scrollTop;
    list.replaceChildren(...shown.map((each) => h("button", { type: "button", "aria-current": each === current, onclick: () => { current = each; draw(); } },
      h("span", {}, each.kind === "trained" ? `step ${each.step}` : h("span", { class: "warm" }, each.reason)), h("span", {}, Number.isFinite(best(each)) ? `best ${short(best(each))}` : "–"), h("small", {}, each.prompt.slice(-80)))));
    list.scrollTop = place;
    if (!placed) requestAnimationFrame(() => { const chosen = list.querySelector("[aria-current=true]"); if (chosen) list.scrollTop = chosen.offsetTop - list.offsetTop - 200; });
    placed = true;
    const facts = Object.entries(current.columns || {}).slice(0, 6).map(([name, value]) => h("span", {}, `${name}: ${String(value).slice(0, 120)}`));
    detail.replaceChildren(h("div", { class: "facts" }, h("b", {}, current.kind === "trained" ? `step ${current.step}` : `dropped: ${current.reason}`), h("span", {}, `ticket ${current.ticket}`),
      current.attempt ? h("span", {}, `attempt ${current.attempt + 1}`) : null, h("span", {}, current.kind === "trained" ? `trained at version ${current.version}` : `admitted at version ${current.version}`), ...facts),
      h("div", { class: "prompt", style: { margin: "10px 0 4px" } }, current.prompt), ...current.samples.map((sample) => oneSample(sample, current.version, kind)));
  }
  draw();
  section("samples", "Samples", "Each token is shaded by the version that sampled it, by how much likelier the learner finds it, or by how unlikely it was. Point at a token for its numbers.",
    h("div", { class: "controls" }, "show", kinds, "shade by", modes, key), h("div", { class: "browser" }, list, detail));
}

function provenance() {
  section("provenance", "Config and provenance", "What this run was made of. No secret is part of it.",
    h("div", { class: "card" }, h("table", {}, h("tr", {}, ["attempt", "began", "code", "python", "torch", "host", "command"].map((name) => h("th", {}, name))),
      D.attempts.map((each) => h("tr", {}, [each.number, each.time, each.code, each.python, each.torch, each.host, each.command].map((value) => h("td", {}, String(value ?? "–")))))),
      D.lost.length ? h("p", { class: "lead", style: { margin: "10px 0 0" } }, `Versions that a restart took out of the line of descent: ${D.lost.join(", ")}`) : null,
      h("details", { style: { marginTop: "12px" } }, h("summary", {}, "The resolved config"), h("pre", {}, D.config))));
}

document.getElementById("name").textContent = D.run;
document.getElementById("sub").textContent = D.sub;
document.getElementById("foot").textContent = `Made ${D.made} by slipstream ${D.release}. This page holds all its data and loads nothing.`;
document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
if (location.hash === "#dark" || location.hash === "#light") document.documentElement.dataset.theme = location.hash.slice(1);
[overview, learning, staleness, speed, ledger, samples, provenance].forEach((draw) => draw());
document.body.dataset.drawn = "yes";
