"use strict";
// Draws the page from the data that the trainer put into it. All text goes in by textContent, never as HTML.
// The page of `samestep watch` fetches the data again every two seconds and draws what has changed.
let data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#2f6fed", "#e8710a", "#12966a", "#c2378f", "#7a52d6", "#c99700", "#0f95b5", "#d4412f", "#6b8e23", "#8a6a52"];
const PARTS = ["#3a7bd5", "#7a52d6", "#e8710a", "#12966a", "#c99700", "#94a0b0", "#c2477f", "#4f6d7a"];
const AXES = { step: "Steps", tokens: "Tokens", hours: "Hours" };

// The charts: title, unit, metrics. Curves of a task are named by it, and its scores have charts of their own.
function chartsOf(data) {
  const named = word => (data.task ? `${data.task}: ${word.toLowerCase()}` : word);
  const measured = [...new Set(data.runs.flatMap(run => Object.keys(run.series)))];
  const probes = measured.filter(name => name.startsWith("probe/")).sort();
  // Those of retrieval, such as heldout/ndcg@10, may be of any run.
  const scores = measured.filter(name => name.startsWith("heldout/") && !["heldout/loss", "heldout/accuracy"].includes(name) && (data.of_task || name.includes("@"))).sort();
  return [
    [named("Loss"), data.of_task ? "of the task" : "nats per prediction", ["train/loss", "heldout/loss"]],
    [named("Accuracy"), data.masked ? "of masked predictions" : data.of_task ? "of the rows" : "of predictions", ["train/accuracy", "heldout/accuracy"]],
    ...scores.map(name => [named(name.slice("heldout/".length).replaceAll("_", " ")), name.includes("@") ? "mean over queries" : "held-out rows", [name]]),
    ...probes.map(name => [`Probe ${name.slice("probe/".length).replaceAll("/", ": ").replaceAll("_", " ")}`, "held-out rows", [name]]),
    ["Throughput", "tokens per second, all devices", ["perf/tokens_per_second"]],
    ["Model FLOPs utilization", "share of the devices' peak", ["perf/mfu"]],
    ["Learning rate", "", ["train/lr"]],
    ["Gradient norm", "before clipping", ["train/grad_norm"]],
    ["Device memory", "GiB, peak", ["perf/peak_memory_gib"]],
  ];
}

const CHARTS = chartsOf(data);
const EVERY = 2000;  // milliseconds between two fetches
const state = { axis: "step", zoom: null, hidden: new Set(), log: new Set(), allSettings: false, dragging: false, lost: false };
const charts = [];
const shown = {};  // what each section shows, as JSON: an equal one is left alone, with its selection and scroll position
const tip = document.getElementById("tip");
const byId = id => document.getElementById(id);

function element(parent, name, attributes = {}, text = null) {
  const svg = parent instanceof SVGElement || name === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    const unit = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([limit]) => size >= limit);
    return +(value / unit[0]).toPrecision(Math.min(digits, 4)) + unit[1];
  }
  return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(digits));
}

const words = name => name.replace("forward_backward", "forward and backward").replaceAll("_", " ");  // the former of older runs
const percent = value => (value === null ? "–" : `${+(100 * value).toPrecision(3)} %`);
const clock = seconds => {
  const total = Math.max(0, Math.round(seconds)), two = value => String(value).padStart(2, "0");
  const hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(total % 60)}` : `${minutes}:${two(total % 60)}`;
};
const duration = hours => hours === null ? "–"
  : hours < 1 / 60 ? `${Math.round(hours * 3600)} s` : hours < 1 ? `${Math.round(hours * 60)} min` : `${+hours.toPrecision(3)} h`;

// ---- Curves -------------------------------------------------------------------------------------------------------

function curvesOf(chart) {
  return data.runs.filter(run => !state.hidden.has(run.name)).flatMap(run => chart.metrics.filter(name => run.series[name]).map(name => {
    const series = run.series[name], axis = run.axes[state.axis];
    const points = (at, y) => at.map((row, i) => [axis[row], y[i]]).filter(([x, v]) => x !== null && v !== null);
    return { run, name, heldout: name.startsWith("heldout/"), raw: points(series.at, series.y), mean: series.mean && points(series.mean_at, series.mean) };
  }));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough) * power;
  const found = [];
  for (let value = Math.ceil(low / step); value * step <= high + step * 1e-9; value++) found.push(+(value * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of [1, 2, 5]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(+(factor * 10 ** power).toPrecision(2));
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

function scales(chart, curves, width, height) {
  const xs = curves.flatMap(curve => curve.raw.map(point => point[0]));
  const [left, right] = state.zoom || [xs.reduce((a, b) => Math.min(a, b), Infinity), xs.reduce((a, b) => Math.max(a, b), -Infinity)];
  const log = state.log.has(chart.title);
  const ys = curves.flatMap(curve => curve.raw.filter(([x]) => x >= left && x <= right).map(point => point[1])).filter(y => !log || y > 0);
  if (!ys.length) return null;
  let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
  if (!log && low > 0 && low < 0.35 * high) low = 0;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
  const span = high - low;
  if (!log) [low, high] = [low === 0 ? 0 : low - 0.04 * span, high + 0.06 * span];
  const bend = log ? Math.log : value => value;
  const box = { left: 52, right: width - 10, top: 12, bottom: height - 24 };
  return {
    box, from: left, to: right,
    x: value => box.left + ((value - left) / (right - left || 1)) * (box.right - box.left),
    y: value => box.bottom - ((bend(value) - bend(low)) / (bend(high) - bend(low))) * (box.bottom - box.top),
    value: pixel => left + ((pixel - box.left) / (box.right - box.left)) * (right - left),
    xTicks: right > left ? ticks(left, right, Math.max(3, Math.floor(width / 75))) : [left],
    yTicks: log ? logTicks(low, high) : ticks(low, high, 5),
    shown: point => !log || point[1] > 0,
  };
}

function path(points, scale) {
  return "M" + points.filter(scale.shown).map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`).join("L");
}

function draw(chart) {
  const svg = chart.svg, width = svg.clientWidth || 560, height = svg.clientHeight || 250;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.curves = curvesOf(chart);
  const scale = (chart.scale = chart.curves.length ? scales(chart, chart.curves, width, height) : null);
  if (!scale) return;
  const { box } = scale;
  for (const tick of scale.yTicks) {
    element(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: scale.y(tick), y2: scale.y(tick) });
    element(svg, "text", { x: box.left - 7, y: scale.y(tick) + 4, "text-anchor": "end" }, number(tick));
  }
  for (const tick of scale.xTicks) element(svg, "text", { x: scale.x(tick), y: height - 6, "text-anchor": "middle" }, number(tick));
  const clip = element(element(svg, "clipPath", { id: `clip-${chart.index}` }), "rect", {
    x: box.left, y: box.top - 6, width: Math.max(0, box.right - box.left + 4), height: box.bottom - box.top + 8,
  });
  const plot = element(svg, "g", { "clip-path": `url(#${clip.parentNode.id})`, fill: "none", "stroke-linejoin": "round" });
  for (const curve of chart.curves) {
    const color = curve.run.color;
    element(plot, "path", { d: path(curve.raw, scale), stroke: color, "stroke-width": curve.mean ? 1 : 1.8, opacity: curve.mean ? 0.28 : 1, "stroke-dasharray": curve.heldout ? "1 5" : "none", "stroke-linecap": "round" });
    if (curve.mean) element(plot, "path", { d: path(curve.mean, scale), stroke: color, "stroke-width": 2 });
    if ((curve.heldout && curve.raw.length < 40) || curve.raw.length < 3) {
      for (const [x, y] of curve.raw.filter(scale.shown)) element(plot, "circle", { cx: scale.x(x), cy: scale.y(y), r: 3, fill: color, stroke: "var(--card)" });
    }
  }
  chart.cross = element(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  chart.select = element(svg, "rect", { class: "select", y: box.top, height: box.bottom - box.top, width: 0 });
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

function hover(chart, event) {
  const x = chart.scale.value(event.clientX - chart.svg.getBoundingClientRect().left);
  for (const other of charts) {
    if (!other.scale || !other.cross) continue;
    const inside = x >= other.scale.from && x <= other.scale.to;
    other.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    other.cross.setAttribute("x1", other.scale.x(x));
    other.cross.setAttribute("x2", other.scale.x(x));
  }
  tip.replaceChildren();
  element(tip, "div", { class: "head" }, `${AXES[state.axis].toLowerCase()} ${number(x)}`);
  for (const curve of chart.curves) {
    const points = curve.mean || curve.raw;
    if (!points.length || x > points[points.length - 1][0] + 0.01 * (chart.scale.to - chart.scale.from)) continue;
    const line = element(tip, "div");
    element(line, "span", { class: "dot", style: `background:${curve.run.color}` });
    element(line, "span", {}, chart.metrics.length > 1 ? `${curve.run.name} · ${curve.name.split("/")[0]}` : curve.run.name);
    element(line, "b", {}, number(nearest(points, x)[1]));
  }
  tip.hidden = false;
  const left = event.clientX + 16, right = event.clientX - 16 - tip.offsetWidth;
  tip.style.left = `${left + tip.offsetWidth > window.innerWidth ? Math.max(4, right) : left}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
}

function leave() {
  tip.hidden = true;
  for (const chart of charts) if (chart.cross) chart.cross.setAttribute("visibility", "hidden");
}

function zoom(range) {
  state.zoom = range;
  document.getElementById("reset").hidden = !range;
  charts.forEach(draw);
}

function addChart(parent, title, unit, metrics) {
  const figure = element(parent, "figure"), caption = element(figure, "figcaption", {}, title);
  element(caption, "span", {}, metrics.length > 1 ? `${unit} · dotted: held-out` : unit);
  const chart = { index: charts.length, title, metrics, figure, curves: [] };
  const toggle = element(caption, "button", { "aria-pressed": false }, "log");
  chart.svg = element(figure, "svg", { role: "img" });
  toggle.onclick = () => {
    state.log.has(title) ? state.log.delete(title) : state.log.add(title);
    toggle.setAttribute("aria-pressed", state.log.has(title));
    draw(chart);
  };
  let start = null;
  const place = event => Math.min(chart.scale.box.right, Math.max(chart.scale.box.left, event.clientX - chart.svg.getBoundingClientRect().left));
  chart.svg.onpointermove = event => {
    if (!chart.scale) return;
    hover(chart, event);
    if (start === null) return;
    chart.select.setAttribute("x", Math.min(start, place(event)));
    chart.select.setAttribute("width", Math.abs(place(event) - start));
  };
  chart.svg.onpointerdown = event => { if (chart.scale && event.button === 0) [start, state.dragging] = [place(event), true]; };
  chart.svg.onpointerup = event => {
    const range = chart.scale && start !== null && Math.abs(place(event) - start) > 6 && [start, place(event)].map(chart.scale.value).sort((a, b) => a - b);
    [start, state.dragging] = [null, false];
    if (range) zoom(range);
  };
  chart.svg.onpointerleave = () => { [start, state.dragging] = [null, false]; if (chart.select) chart.select.setAttribute("width", 0); leave(); };
  chart.svg.ondblclick = () => zoom(null);
  charts.push(chart);
  new ResizeObserver(() => draw(chart)).observe(chart.svg);
}

function updateCharts() {
  const known = new Set(charts.flatMap(chart => chart.metrics));
  const others = [...new Set(data.runs.flatMap(run => Object.keys(run.series)))].filter(name => !known.has(name)).sort();
  for (const name of others) addChart(document.querySelector("#more > div"), name, "", [name]);
  for (const chart of charts) {
    chart.figure.hidden = !data.runs.some(run => chart.metrics.some(name => run.series[name]));
    chart.svg.setAttribute("aria-label", `${chart.title}: ${data.runs.map(run => run.name).join(", ")}`);
    draw(chart);
  }
}

// ---- Tables -------------------------------------------------------------------------------------------------------

/** Runs `fill` on an emptied section, unless it shows this content already. */
function section(id, content, fill) {
  const text = JSON.stringify(content);
  if (shown[id] === text) return;
  shown[id] = text;
  byId(id).replaceChildren();
  fill(byId(id));
}

function table(parent, title, columns, rows) {
  element(parent, "h2", {}, title);
  const body = element(parent, "table");
  const head = element(element(body, "thead"), "tr");
  for (const [name, numeric] of columns) element(head, "th", numeric ? { class: "number" } : {}, name);
  const lines = element(body, "tbody");
  for (const { cells, color, ...attributes } of rows) {
    const line = element(lines, "tr", attributes);
    cells.forEach((cell, i) => {
      const td = element(line, "td", { "data-label": columns[i][0], ...(columns[i][1] ? { class: "number" } : {}) });
      const value = element(td, "span");
      if (i === 0 && color) element(value, "span", { class: "dot", style: `background:${color}` });
      value.append(cell);
    });
  }
  return body;
}

// ---- Status -------------------------------------------------------------------------------------------------------

/** The time left, from a forecast made at `time`; it counts down between two rows. */
function left(eta, time, now) {
  if (!eta || eta[0] === null || eta[0] === undefined) return null;
  const [middle, low, high] = eta.map(seconds => seconds - (now - time));
  return low === undefined || Number.isNaN(low) ? `ends in ${clock(middle)}` : `ends in ${clock(low)} to ${clock(high)}`;
}

function progress(parent, name, color, badge, share, lines) {
  const box = element(parent, "div", { class: "status" }), head = element(box, "div", { class: "name" });
  element(head, "span", { class: "dot", style: `background:${color}` });
  element(head, "b", {}, name);
  element(head, "span", { class: `badge ${badge}` }, badge);
  const bar = element(box, "div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-label": name });
  element(bar, "i", { style: `width:${100 * share}%;background:${color}` });
  for (const line of lines.filter(Boolean)) element(box, "div", {}, line);
}

function status() {
  const now = data.live ? Date.now() / 1000 - state.skew : data.now;
  const runs = data.runs.map(run => {
    const { step, steps, train_loss, heldout_loss, tokens_per_second } = run.summary, { state: badge, time, eta } = run.status;
    const going = badge === "running";
    const age = time === null ? null : Math.max(0, now - time);
    return {
      name: run.name, color: run.color, badge, share: steps ? Math.min(1, step / steps) : 0,
      lines: [
        badge === "waiting" ? `waits for ${run.path} to start` : steps ? `step ${step.toLocaleString("en-US")} of ${steps.toLocaleString("en-US")}, ${percent(step / steps)}` : `step ${number(step)}`,
        going ? left(eta, time, now) || "the end is forecast after the first steps" : null,
        train_loss === null ? null : `loss ${number(train_loss)}${heldout_loss === null ? "" : `, held-out ${number(heldout_loss)}`}`,
        tokens_per_second === null ? null : `${number(tokens_per_second)} tokens/s`,
        age === null || (!data.live && badge === "finished") ? null : `last row ${age < 100 ? `${Math.round(age)} s` : clock(age)} ago`,
      ],
    };
  });
  const suites = data.suites.map((suite, i) => ({
    name: suite.name, color: suite.color, share: suite.total ? suite.finished / suite.total : 0,
    badge: suite.finished === suite.total ? "finished" : suite.running.length ? "running" : "stopped",
    lines: [
      `${suite.finished} of ${suite.total} runs finished`,
      suite.finished < suite.total && suite.eta ? left([suite.eta[1], suite.eta[0], suite.eta[2]], data.now, now) : null,
      ...suite.running.map(run => `${run.task} ${run.run}: step ${run.step} of ${run.steps}`),
    ],
  }));
  const studies = data.studies.map(study => ({
    name: study.name, color: study.color, share: study.total ? study.finished / study.total : 0,
    badge: study.finished === study.total ? "finished" : study.running.length ? "running" : "stopped",
    lines: [
      study.question,
      `${study.finished} of ${study.total} jobs finished`,
      study.finished < study.total && study.eta ? left([study.eta[1], study.eta[0], study.eta[2]], data.now, now) : null,
      ...study.running,
    ],
  }));
  const all = [...runs, ...suites, ...studies];
  section("status", all, parent => {
    for (const { name, color, badge, share, lines } of all) progress(parent, name, color, badge, share, lines);
  });
  const lost = state.lost ? "no answer from samestep watch; the page shows what it had last" : "";
  if (byId("lost").textContent !== lost) byId("lost").textContent = lost;
  byId("lost").hidden = !lost;
}

function suites() {
  const rows = data.suites.flatMap(suite => suite.tasks.map(task => ({
    color: suite.color,
    cells: [suite.name, task.task, `${task.finished} of ${task.total}`, task.score, task.mean === null ? "–" : number(100 * task.mean), task.best === null ? "–" : number(100 * task.best), clock(task.seconds)],
  })));
  section("suites", rows, parent => {
    if (!rows.length) return;
    table(parent, "Suites", [["Suite"], ["Task"], ["Runs", true], ["Score"], ["Mean", true], ["Best", true], ["Time", true]], rows);
  });
}

/** A link of the live page; in a file, where the address leads nowhere, the text and the folder. */
function linked(address, text, path) {
  if (address === null) return `${text} (${path})`;
  const link = document.createElement("a");
  link.setAttribute("href", address.split("/").map(encodeURIComponent).join("/"));
  link.textContent = text;
  return link;
}

function studies() {
  section("studies", data.studies.map(study => [study.name, study.page, study.stages]), parent => {
    if (!data.studies.length) return;
    table(parent, "Studies", [["Study"], ["Stage"], ["Jobs", true], ["Time", true]], data.studies.flatMap(study => study.stages.map((stage, i) => ({
      color: study.color,
      cells: [
        i || (data.live && !study.page) ? study.name : linked(study.page, study.name, study.path),
        stage.stage, `${stage.finished} of ${stage.total}`, clock(stage.seconds),
      ],
    }))));
  });
  const runs = data.studies.flatMap(study => study.runs.map(run => ({
    color: study.color, cells: [run.link, run.run, run.path, run.state, number(run.step, 9)],
  })));
  byId("jobs").hidden = !runs.length;
  section("study-runs", runs, parent => {
    if (!runs.length) return;
    table(parent, "Runs", [["Run"], ["State"], ["Step", true]], runs.map(({ color, cells: [link, run, path, ...rest] }) => ({ color, cells: [linked(link, run, path), ...rest] })));
  });
}

function ledger() {
  const rows = data.runs.filter(run => run.ledger.rows).map(run => ({
    color: run.color,
    cells: [
      run.name, run.ledger.steps.map(([first, last]) => `${first} to ${last}`).join(", ") || "–", String(run.ledger.orders), String(run.ledger.rows),
      run.ledger.edges ? `${run.ledger.joined} of ${run.ledger.edges} joined` : "none",
      run.ledger.head,
    ],
  }));
  section("ledger", rows, parent => {
    if (rows.length) table(parent, "Ledger", [["Run"], ["Steps"], ["Data orders", true], ["Rows", true], ["Restarts"], ["Head"]], rows);
  });
}

function faults() {
  const rows = data.runs.flatMap(run => run.faults.map(fault => ({
    color: run.color, cells: [run.name, number(fault.step), new Date(1000 * fault.time).toLocaleString(), fault.title, fault.text],
  })));
  section("faults", rows, parent => {
    if (rows.length) table(parent, "Faults and alerts", [["Run"], ["Step", true], ["When"], ["What"], ["Details"]], rows);
  });
}

function summary() {
  const figures = [
    ["Steps", s => (s.steps && s.step < s.steps ? `${number(s.step)} of ${number(s.steps)}` : number(s.step)), s => s.step],
    ["Tokens", s => number(s.tokens), s => s.tokens], ["Time", s => duration(s.hours), s => s.hours],
    ["Training loss", s => number(s.train_loss), s => s.train_loss], ["Held‑out loss", s => number(s.heldout_loss), s => s.heldout_loss],
    ["Best held‑out", s => number(s.best_heldout_loss), s => s.best_heldout_loss],
    ["Tokens/s", s => number(s.tokens_per_second), s => s.tokens_per_second], ["MFU", s => percent(s.mfu), s => s.mfu],
    ["MFU of real tokens", s => percent(s.mfu_useful), s => s.mfu_useful], ["Padding", s => percent(s.padding), s => s.padding],
    ["Planned memory", s => `${number(s.planned_memory_gib, 3)} GiB`, s => s.planned_memory_gib],
    ["Peak memory", s => `${number(s.peak_memory_gib, 3)} GiB`, s => s.peak_memory_gib],
    ["Peak RSS", s => `${number(s.peak_rss_gib, 3)} GiB`, s => s.peak_rss_gib],
    ["Energy", s => `${number(s.energy_kwh, 3)} kWh`, s => s.energy_kwh],
    ["Exposed communication", s => percent(s.communication), s => s.communication], ["Restarts", s => String(s.restarts), s => s.restarts],
  ].filter(([, , value]) => data.runs.some(run => value(run.summary) !== null));
  const rows = data.runs.map(run => ({
    color: run.color, title: run.path,
    cells: [run.name, ...figures.map(([, show, value]) => (value(run.summary) === null ? "–" : show(run.summary)))],
  }));
  section("summary", rows, parent => table(parent, "Summary", [["Run"], ...figures.map(([name]) => [name, true])], rows));
}

/** Scores of each class by `samestep evaluate`, and the confusion matrix or the largest confusions. */
function classes() {
  const runs = data.runs.filter(run => run.classes);
  const score = (color, name, s) => ({ color, cells: [name, ...[s.precision, s.recall, s.f1].map(value => value.toFixed(4)), number(s.support)] });
  section("classes", runs.map(run => [run.name, run.color, run.classes]), parent => {
    for (const { name, color, classes: found } of runs) {
      const names = Object.keys(found.classes);
      table(parent, `Classes: ${name}, step ${number(found.step)}`, [["Class"], ["Precision", true], ["Recall", true], ["F1", true], ["Support", true]], [
        ...names.map(each => score(color, each, found.classes[each])),
        ...Object.keys(found.averages).map(each => score(null, `${each} average`, found.averages[each]))]);
      if (found.confusion) table(parent, "Confusion matrix: a row for each label, a column for each prediction", [["Label"], ...names.map(each => [each, true])],
        found.confusion.map((counts, i) => ({ cells: [names[i], ...counts.map(count => number(count))] })));
      if (found.largest_confusions) table(parent, "Largest confusions", [["Label"], ["Prediction"], ["Rows", true]],
        found.largest_confusions.map(each => ({ cells: [each.label, each.prediction, number(each.count)] })));
    }
  });
}

function shares() {
  const runs = data.runs.filter(run => Object.keys(run.shares).length);
  section("shares", runs.map(run => [run.name, run.shares]), parent => runs.length && fillShares(parent, runs));
}

function fillShares(section, runs) {
  const known = ["forward", "backward", "forward_backward", "waiting", "optimizer", "data_wait", "evaluation", "checkpoint", "snapshot", "logging"];
  const names = [...new Set([...known, ...runs.flatMap(run => Object.keys(run.shares))])].filter(name => runs.some(run => run.shares[name]));
  element(section, "h2", {}, "Where the time goes");
  const grid = element(section, "div", { class: "share" });
  for (const run of runs) {
    element(grid, "div", {}, run.name);
    const bar = element(grid, "div", { class: "bar" });
    names.forEach((name, i) => {
      const share = run.shares[name] || 0;
      element(bar, "i", { style: `width:${100 * share}%;background:${PARTS[i % PARTS.length]}`, title: `${words(name)}: ${percent(share)}` }, share > 0.05 ? percent(share) : "");
    });
  }
  const legend = element(section, "div", { class: "legend" });
  names.forEach((name, i) => {
    const entry = element(legend, "span");
    element(entry, "span", { class: "dot", style: `background:${PARTS[i % PARTS.length]}` });
    entry.append(words(name));
  });
}

function settings() {
  const several = data.runs.length > 1, differing = data.settings.some(setting => setting.differs);
  const all = state.allSettings || !differing;
  const chosen = data.settings.filter(setting => all || setting.differs);
  section("settings", [all, chosen, data.runs.map(run => run.name)], parent => {
    if (!data.settings.length) return;
    const marked = data.settings.some(setting => setting.changed);
    table(parent, several && !all ? "Settings that differ" : "Settings", [["setting"], ...data.runs.map(run => [run.name])],
      chosen.map(({ key, values, differs, changed }) => ({ cells: [key, ...values],
        class: all && differs ? "differs" : all && marked && !changed ? "default" : "" })));
    if (all && marked) element(parent, "p", { class: "dim" }, "Settings with another value than the default come first.");
    const toggle = element(parent, "button", {}, all ? "Fewer" : "All settings");
    toggle.hidden = !several || !differing;
    toggle.onclick = () => { state.allSettings = !state.allSettings; settings(); };
  });
}

function starts() {
  const rows = data.runs.flatMap(run => run.starts.map(({ step, time, ...facts }) => ({ run, step, time, facts })));
  const slowest = data.runs.filter(run => run.status.slowest_rank !== null);
  const names = [...new Set(rows.flatMap(row => Object.keys(row.facts)))];
  const cells = rows.map(({ run, step, time, facts }) => ({
    color: run.color,
    cells: [run.name, number(step), new Date(1000 * time).toLocaleString(), ...names.map(name => String(facts[name] ?? "–"))],
  }));
  const notes = slowest.map(run => `${run.name}: the others wait for rank ${run.status.slowest_rank}; without it the run would gain ${percent(run.status.slowest_rank_lag)} of its time.`);
  section("starts", [cells, notes], parent => {
    if (!rows.length) return;
    table(parent, "Starts, machines and ranks", [["Run"], ["From step", true], ["When"], ...names.map(name => [words(name)])], cells);
    for (const note of notes) element(parent, "p", { class: "dim" }, note);
  });
}

// ---- The page -----------------------------------------------------------------------------------------------------

function runButtons() {
  section("runs", data.runs.map(run => run.name), parent => {
    for (const run of data.runs) {
      const button = element(parent, "button", { "aria-pressed": !state.hidden.has(run.name), title: run.path });
      element(button, "span", { class: "dot", style: `background:${run.color}` });
      button.append(run.name);
      button.onclick = () => {
        state.hidden.has(run.name) ? state.hidden.delete(run.name) : state.hidden.add(run.name);
        button.setAttribute("aria-pressed", !state.hidden.has(run.name));
        charts.forEach(draw);
      };
    }
  });
}

function controls() {
  for (const [axis, title] of Object.entries(AXES)) {
    const button = element(byId("axis"), "button", { "aria-pressed": axis === state.axis }, title);
    button.onclick = () => {
      state.axis = axis;
      for (const other of button.parentNode.children) other.setAttribute("aria-pressed", other === button);
      zoom(null);
    };
  }
  byId("reset").onclick = () => zoom(null);
  const root = document.documentElement;
  root.dataset.theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  byId("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
}

/** Takes over new data and draws what it changes. */
function update(fetched) {
  data = fetched;
  state.skew = Date.now() / 1000 - data.now;
  [...data.runs, ...data.suites, ...data.studies].forEach((run, i) => { run.color = COLORS[i % COLORS.length]; });
  document.querySelector("h1").textContent = data.live ? "Training, live" : "Training report";
  runButtons();
  status();
  suites();
  studies();
  if (data.runs.length) summary();
  classes();
  // A selection with the mouse is not disturbed; the next data come in two seconds.
  if (!state.dragging) updateCharts();
  shares();
  ledger();
  faults();
  settings();
  starts();
}

let etag = "";
async function refresh() {
  try {
    const response = await fetch("data", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
    state.lost = false;
    if (response.status === 200) {
      etag = response.headers.get("ETag");
      const next = await response.json();
      // A run that has just started may need other charts.
      if (String(chartsOf(next)) !== String(CHARTS)) location.reload();
      else update(next);
    } else status();
  } catch {
    state.lost = true;
    status();
  }
  setTimeout(refresh, EVERY);
}

controls();
for (const [title, unit, metrics] of CHARTS) addChart(byId("charts"), title, unit, metrics);
byId("more").ontoggle = () => charts.forEach(draw);
update(data);
if (data.live) setTimeout(refresh, EVERY);
