// Draws a dashboard's JSON with answers of a real Prometheus, for pictures. A few hundred lines instead of Grafana: layout, units, mappings, thresholds,
// overrides, merges of tables are taken from the JSON, so what is wrong there shows; fonts, hover and menus are not Grafana's.
"use strict";
const COLOURS = {
  green: "#73BF69", orange: "#FF9830", red: "#F2495C", blue: "#5794F2", purple: "#B877D9", yellow: "#FADE2A", text: "#2c3039",
  "dark-red": "#C4162A", "dark-orange": "#FA6400", "dark-purple": "#8F3BB8", "light-blue": "#8AB8FF", "light-green": "#96D98D", "super-light-purple": "#DEB6F2",
};
const PALETTE = ["#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0", "#37872D", "#FADE2A", "#C0D8FF", "#FFA6B0"];
const CELL = 1480 / 24, ROW = 30, GAP = 8;
const make = (tag, style, text) => { const it = document.createElement(tag); it.style.cssText = style || ""; if (text !== undefined) it.textContent = text; return it; };
const colour = (name) => COLOURS[name] || name;

function amount(value, unit, decimals) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const round = (x, most) => String(+x.toFixed(decimals ?? (x && Math.abs(x) < 1 ? 2 : most)));
  if (unit === "percentunit") return round(value * 100, 1) + "%";
  if (unit === "s") {
    const size = Math.abs(value);
    if (size < 1e-3) return round(value * 1e6, 0) + " µs";
    if (size < 1) return round(value * 1e3, 0) + " ms";
    return size < 90 ? round(value, 1) + " s" : size < 5400 ? round(value / 60, 1) + " min" : round(value / 3600, 1) + " h";
  }
  if (unit === "bytes" || unit === "Bps") {
    const names = unit === "bytes" ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], base = unit === "bytes" ? 1024 : 1000;
    let at = 0;
    while (Math.abs(value) >= base && at < names.length - 1) { value /= base; at += 1; }
    return round(value, 1) + " " + names[at];
  }
  const said = Math.abs(value) >= 1e6 ? value.toExponential(2) : Math.abs(value) >= 100 ? round(value, 0) : round(value, 2);
  return said + (unit === "ops" ? " ops/s" : unit && unit.startsWith("suffix:") ? unit.slice(7) : "");
}

function mapped(value, mappings) {
  for (const mapping of mappings || []) if (mapping.type === "value" && mapping.options[String(value)]) return mapping.options[String(value)];
  return null;
}

function threshold(value, steps) {
  let found = "text";
  for (const step of steps || []) if (step.value === null || step.value === undefined || value >= step.value) found = step.color;
  return found;
}

const named = (series) => series.legend ? series.legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => series.labels[label] ?? "") : JSON.stringify(series.labels);

function series(panel) {
  return panel.answers.flatMap((answer) => answer.result.map((one) => {
    const it = { labels: one.metric, legend: answer.legend, points: (one.values || [one.value]).map(([at, value]) => [+at, +value]) };
    it.name = named(it);
    for (const override of panel.fieldConfig.overrides) if (override.matcher.options === it.name) for (const property of override.properties) {
      if (property.id === "displayName") it.shown = property.value;
      if (property.id === "color") it.colour = colour(property.value.fixedColor);
    }
    return it;
  }));
}

function noData(box, panel) {
  box.append(make("div", "color:#8e8e9c;margin:auto;font-size:13px", panel.fieldConfig.defaults.noValue || "No data"));
}

function drawStat(box, panel) {
  const all = series(panel), defaults = panel.fieldConfig.defaults;
  if (!all.length) return noData(box, panel);
  const row = make("div", "display:flex;flex:1;gap:2px;min-height:0");
  for (const one of all) {
    const value = one.points.at(-1)[1], word = mapped(value, defaults.mappings);
    const back = one.colour && panel.options.textMode === "name" ? one.colour : panel.options.colorMode === "background" ? colour(word?.color || threshold(value, defaults.thresholds?.steps)) : "transparent";
    const name = panel.options.textMode === "name", both = panel.options.textMode === "value_and_name";
    const text = name ? one.name.replace(/_/g, " ") : (both ? one.name + " " : "") + (word?.text ?? amount(value, defaults.unit, defaults.decimals));
    const dark = back !== "transparent" && back !== COLOURS.text;
    const cell = make("div", `flex:1;display:flex;align-items:center;justify-content:center;border-radius:2px;background:${back};color:${dark ? "#111217" : "#e6e6f0"};`
      + `font-weight:500;font-size:${all.length > 1 ? 18 : text.length > 14 ? 17 : text.length > 7 ? 22 : 30}px;text-align:center`, text);
    row.append(cell);
  }
  box.append(row);
}

function canvas(box, height) {
  const it = make("canvas", `width:100%;flex:1;min-height:0`);
  box.append(it);
  const place = it.getBoundingClientRect();
  it.width = place.width; it.height = Math.max(10, height ? Math.min(height, place.height) : place.height);
  const pen = it.getContext("2d");
  pen.font = "11px Inter, Arial, sans-serif"; pen.fillStyle = "#ccccdc";
  return [pen, it.width, it.height];
}

function legend(box, entries) {
  const row = make("div", "display:flex;flex-wrap:wrap;gap:2px 12px;font-size:11px;max-height:32px;overflow:hidden;flex:none");
  for (const [name, shade] of entries) {
    const item = make("span", "white-space:nowrap");
    item.append(make("span", `display:inline-block;width:12px;height:4px;margin-right:5px;vertical-align:middle;border-radius:2px;background:${shade}`), name);
    row.append(item);
  }
  box.append(row);
}

function timeAxis(pen, left, width, height) {
  const span = DATA.end - DATA.begin, count = Math.max(2, Math.floor(width / 110));
  pen.fillStyle = "#8e8e9c"; pen.textAlign = "center"; pen.textBaseline = "bottom";
  for (let i = 0; i <= count; i += 1) {
    const at = DATA.begin + (span * i) / count, text = new Date(at * 1000).toISOString().slice(11, span < 1200 ? 19 : 16);
    pen.fillText(text, Math.min(left + width - 28, Math.max(left + 18, left + (width * i) / count)), height);
  }
}

function drawLines(box, panel) {
  const all = series(panel), defaults = panel.fieldConfig.defaults, custom = defaults.custom || {};
  if (!all.length) return noData(box, panel);
  all.forEach((one, at) => { one.colour = one.colour || PALETTE[at % PALETTE.length]; one.shown = one.shown || one.name; });
  const foot = make("div", "flex:none;order:2");
  box.append(foot);
  const last = (one) => panel.options.legend.calcs.length ? `  ${amount(one.points.at(-1)[0] >= DATA.end - 2 * panel.answers[0].step ? one.points.at(-1)[1] : 0, defaults.unit, 0)}` : "";
  legend(foot, all.slice(0, 14).map((one) => [one.shown + last(one), one.colour]));
  const [pen, width, height] = canvas(box), left = 66, bottom = 16, stacked = custom.stacking?.mode === "normal";
  const times = [...new Set(all.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b), base = new Map(times.map((at) => [at, 0]));
  if (stacked) for (const one of all) one.points = one.points.map(([at, value]) => { const low = base.get(at); base.set(at, low + value); return [at, low + value, low]; });
  const values = all.flatMap((one) => one.points.map((point) => point[1])).filter(Number.isFinite);
  let low = defaults.min ?? Math.min(...values), high = defaults.max ?? Math.max(...values, low + 1e-9);
  if (high <= low) high = low + 1;
  high += (high - low) * 0.05;
  const x = (at) => left + ((at - DATA.begin) / (DATA.end - DATA.begin)) * (width - left), y = (value) => 4 + (1 - (value - low) / (high - low)) * (height - bottom - 8);
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (let i = 0; i <= 4; i += 1) {
    const value = low + ((high - low) * i) / 4;
    pen.strokeStyle = "#24272d"; pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(width, y(value)); pen.stroke();
    pen.fillStyle = "#8e8e9c"; pen.fillText(amount(value, defaults.unit, defaults.unit === "none" && high - low < 4 ? 1 : undefined), left - 5, Math.max(8, y(value)));
  }
  timeAxis(pen, left, width - left, height);
  const step = Math.max(...panel.answers.map((answer) => answer.step || 0), 0.001);
  for (const one of [...all].reverse()) {
    pen.strokeStyle = pen.fillStyle = one.colour; pen.lineWidth = 1.3;
    if (custom.drawStyle === "bars" || stacked) {
      pen.globalAlpha = stacked && custom.drawStyle !== "bars" ? 0.75 : 0.9;
      for (const [at, top, from] of one.points) if (top > (from || 0)) pen.fillRect(x(at) - 0.5, y(top), x(at + step) - x(at) + 0.6, y(from || Math.max(0, low)) - y(top));
      pen.globalAlpha = 1;
      continue;
    }
    pen.beginPath();
    one.points.forEach(([at, value], i) => { if (i && at - one.points[i - 1][0] < step * 1.5) pen.lineTo(x(at), y(value)); else pen.moveTo(x(at), y(value)); });
    pen.stroke();
  }
}

function drawBands(box, panel) {
  const all = series(panel), defaults = panel.fieldConfig.defaults, cells = panel.type === "status-history";
  if (!all.length) return noData(box, panel);
  const shown = all.slice(0, panel.options.perPage || 20), seen = new Map();
  for (const one of shown) for (const point of one.points) { const word = mapped(point[1], defaults.mappings); if (word) seen.set(word.text, colour(word.color)); }
  const foot = make("div", "flex:none;order:2");
  box.append(foot); legend(foot, [...seen]);
  const [pen, width, height] = canvas(box), left = Math.min(120, 12 + Math.max(...shown.map((one) => pen.measureText(one.shown || one.name).width))), tall = (height - 16) / shown.length;
  const x = (at) => left + ((at - DATA.begin) / (DATA.end - DATA.begin)) * (width - left);
  shown.forEach((one, row) => {
    pen.fillStyle = "#ccccdc"; pen.textAlign = "right"; pen.textBaseline = "middle";
    if (tall > 9) pen.fillText(one.shown || one.name, left - 6, (row + 0.5) * tall);
    const step = panel.answers[0].step;
    for (let i = 0; i < one.points.length; i += 1) {
      const [at, value] = one.points[i], word = mapped(value, defaults.mappings);
      pen.fillStyle = colour(word?.color || threshold(value, defaults.thresholds?.steps));
      pen.fillRect(x(at), row * tall + tall * 0.1, x(at + step) - x(at) + (cells ? -1 : 0.6), tall * 0.8);
    }
  });
  timeAxis(pen, left, width - left, height);
}

function drawHeat(box, panel) {
  const all = series(panel);
  if (!all.length) return noData(box, panel);
  const [pen, width, height] = canvas(box), left = 90, tall = (height - 16) / all.length, most = Math.max(1e-9, ...all.flatMap((one) => one.points.map((point) => point[1])));
  const x = (at) => left + ((at - DATA.begin) / (DATA.end - DATA.begin)) * (width - left);
  const times = [...new Set(all.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b), step = panel.answers[0].step;
  all.forEach((one, row) => {
    pen.fillStyle = "#8e8e9c"; pen.textAlign = "right"; pen.textBaseline = "middle";
    if (row % Math.ceil(12 / tall) === 0) pen.fillText(one.name, left - 6, (row + 0.5) * tall);
    for (const [at, value] of one.points) {
      const strength = Math.sqrt(Math.max(0, value) / most);
      pen.fillStyle = `rgb(${Math.round(36 + 219 * strength)},${Math.round(39 + 81 * strength)},${Math.round(45 * (1 - strength))})`;
      pen.fillRect(x(at), row * tall, x(at + step) - x(at) + 0.6, tall + 0.4);
    }
  });
  timeAxis(pen, left, width - left, height);
}

function drawBars(box, panel) {
  const all = series(panel), defaults = panel.fieldConfig.defaults;
  if (!all.length) return noData(box, panel);
  const most = defaults.max ?? Math.max(1e-9, ...all.map((one) => one.points.at(-1)[1]));
  const list = make("div", "display:flex;flex-direction:column;gap:3px;flex:1;min-height:0;overflow:hidden");
  for (const one of all) {
    const value = one.points.at(-1)[1], row = make("div", "display:flex;align-items:center;flex:1;max-height:26px;gap:8px;font-size:12px");
    row.append(make("span", "width:110px;text-align:right;white-space:nowrap;overflow:hidden", one.shown || one.name));
    const track = make("div", "flex:1;height:80%;background:#24272d");
    track.append(make("div", `height:100%;width:${Math.min(100, (100 * value) / most)}%;background:${colour(threshold(value, defaults.thresholds.steps))}`));
    row.append(track, make("span", "width:70px", amount(value, defaults.unit, defaults.decimals)));
    list.append(row);
  }
  box.append(list);
}

function table(panel) {
  const refs = panel.answers.map((answer) => answer.ref), one = refs.length === 1;
  const frames = panel.answers.map((answer) => answer.result.map((found) => ({ ...found.metric, [one ? "Value" : "Value #" + answer.ref]: +found.value[1] }))).filter((rows) => rows.length);
  let rows = frames.flat();
  if (panel.transformations.some((step) => step.id === "merge") && frames.length) {
    const keys = Object.keys(frames[0][0]).filter((key) => frames.every((frame) => frame.some((row) => key in row))), merged = new Map();
    for (const row of rows) { const key = JSON.stringify(keys.map((name) => row[name])); merged.set(key, { ...merged.get(key), ...row }); }
    rows = [...merged.values()];
  }
  const keep = panel.transformations.find((step) => step.id === "filterFieldsByName").options.include.names;
  const { indexByName, renameByName } = panel.transformations.find((step) => step.id === "organize").options;
  const present = keep.filter((name) => rows.some((row) => name in row)).sort((a, b) => indexByName[a] - indexByName[b]);
  const [by] = panel.options.sortBy, source = present.find((name) => renameByName[name] === by.displayName);
  rows.sort((a, b) => (by.desc ? -1 : 1) * ((+a[source] || 0) - (+b[source] || 0)));
  return [present.map((name) => [name, renameByName[name]]), rows];
}

function drawTable(box, panel) {
  const [columns, rows] = table(panel);
  if (!rows.length) return noData(box, panel);
  const it = make("table", "border-collapse:collapse;width:100%;font-size:12px;text-align:left");
  const head = it.insertRow();
  for (const [, shown] of columns) head.append(make("th", "padding:4px 8px;color:#6E9FFF;font-weight:500;border-bottom:1px solid #2c3039", shown));
  for (const row of rows.slice(0, Math.floor((box.clientHeight - 30) / 25))) {
    const line = it.insertRow();
    for (const [name, shown] of columns) {
      const properties = Object.fromEntries((panel.fieldConfig.overrides.find((found) => found.matcher.options === shown)?.properties || []).map((found) => [found.id, found.value]));
      const value = row[name], word = mapped(value, properties.mappings);
      const text = word?.text ?? (typeof value === "number" ? amount(value, properties.unit, properties.decimals) : value ?? "");
      const shade = properties["custom.cellOptions"] && value !== undefined ? colour(word?.color || threshold(value, properties.thresholds?.steps)) : "transparent";
      const dark = shade !== "transparent" && shade !== COLOURS.text;
      line.append(make("td", `padding:3px 8px;border-bottom:1px solid #24272d;background:${shade};color:${dark ? "#111217" : properties.links ? "#6E9FFF" : "#ccccdc"}`, text));
    }
  }
  box.append(it);
}

const DRAW = { stat: drawStat, timeseries: drawLines, table: drawTable, heatmap: drawHeat, "state-timeline": drawBands, "status-history": drawBands, bargauge: drawBars };

function page() {
  const top = make("div", "padding:8px 12px;font-size:18px", DATA.board.title);
  top.append(make("span", "font-size:12px;color:#8e8e9c;margin-left:16px", DATA.note));
  document.body.append(top);
  const whole = make("div", "position:relative;margin:0 8px");
  document.body.append(whole);
  let tall = 0;
  for (const panel of DATA.board.panels) {
    const { x, y, w, h } = panel.gridPos, place = `position:absolute;left:${x * CELL}px;top:${y * (ROW + GAP)}px;width:${w * CELL - GAP}px;height:${h * (ROW + GAP) - GAP}px;`;
    tall = Math.max(tall, (y + h) * (ROW + GAP));
    if (panel.type === "row") { whole.append(make("div", place + "font-size:15px;line-height:30px;color:#ccccdc", (panel.collapsed ? "▸ " : "▾ ") + panel.title)); continue; }
    const card = make("div", place + "background:#181b1f;border:1px solid #24272d;border-radius:3px;display:flex;flex-direction:column;padding:4px 8px 6px;box-sizing:border-box;overflow:hidden");
    card.append(make("div", "font-size:13px;font-weight:500;padding:2px 0 4px;white-space:nowrap;flex:none", panel.title));
    const box = make("div", "flex:1;display:flex;flex-direction:column;min-height:0");
    card.append(box); whole.append(card);
    DRAW[panel.type](box, panel);
  }
  whole.style.height = tall + "px";
}
page();
