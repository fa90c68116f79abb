"use strict";
// What every part of the page uses: asking the gateway, elements, figures as text, charts.

const KEY = "keepgate-admin-key";
const DEADLINE = 15000;
const get = id => document.getElementById(id);
const charts = {};

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.isKeyWrong = status === 401; // 403: the gateway has no admin key, and what to do
  }
}

async function ask(method, path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["x-keepgate-admin-key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body, signal: AbortSignal.timeout(DEADLINE) });
  const decoded = await answer.json().catch(() => ({}));
  if (answer.status === 401 || answer.status === 403) throw new Refused(decoded.error?.message ?? "The admin key is needed.", answer.status);
  if (!answer.ok) throw new Error(decoded.error?.message ?? `${path}: status ${answer.status}`);
  return decoded;
}

// Texts, never markup: names of models and errors come from elsewhere.
function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function fill(id, rows, empty) {
  const body = get(id), heads = [...body.closest("table").tHead.rows[0].cells].map(head => head.textContent.trim());
  const made = rows.map(cells => {
    const row = element("tr");
    for (const [place, cell] of cells.entries()) {
      const field = element("td", "", { "data-label": heads[place] }); // what a narrow page shows beside it
      field.append(cell ?? "–");
      row.append(field);
    }
    return row;
  });
  if (!made.length) {
    const row = element("tr");
    row.append(element("td", empty, { class: "empty", colspan: heads.length }));
    made.push(row);
  }
  body.replaceChildren(...made);
}

// Whether the keyboard is in a part of the page, whose buttons then stay where they are.
const isTouched = id => get(id).querySelector("tbody")?.contains(document.activeElement) ?? false;

const count = number => number >= 1e6 ? `${(number / 1e6).toFixed(1)} M` : number >= 1e4 ? `${(number / 1e3).toFixed(1)} k` : String(Math.round(number));
const share = part => `${(100 * part).toFixed(1)} %`;
const size = bytes => bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : bytes >= 1e3 ? `${(bytes / 1e3).toFixed(1)} kB` : `${bytes} B`;
const rate = number => number >= 100 ? count(number) : number.toFixed(1);
// Of a small share: two digits that say something.
const fine = part => part === 0 ? "0 %" : `${Number((100 * part).toPrecision(2))} %`;
// As gateway/commands/amounts.py: what is not known is never 0.
function dollars(amount, unpriced = 0) {
  if (amount === null || amount === undefined || (!amount && unpriced)) return "–";
  if (amount > 0 && amount < 0.0001) return "<$0.0001";
  return amount >= 1 || amount === 0 ? `$${amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}` : `$${amount.toFixed(4)}`;
}
function seconds(time) {
  if (time === null || time === undefined) return "–";
  if (time >= 172800) return `${Math.round(time / 86400)} d`;
  if (time >= 7200) return `${Math.round(time / 3600)} h`;
  if (time >= 120) return `${Math.round(time / 60)} min`;
  if (time >= 1) return `${time.toFixed(1)} s`;
  return `${time >= 0.1 || time === 0 ? Math.round(time * 1000) : (time * 1000).toPrecision(2)} ms`;
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `whole` is for what is counted: no parts of one on its axis.
const STEPS = [1, 2, 5, 10, 15, 30].map(step => [step, 60 * step]).flat().concat(3600, 7200, 14400).sort((a, b) => a - b);
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap(power => [1, 2, 5].map(step => step * 10 ** power));

function draw(id, series, data, format, { points = false, whole = false } = {}) {
  const place = get(id), width = Math.max(240, place.clientWidth);
  if (charts[id]) {
    charts[id].setData(data);
    return;
  }
  const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  charts[id] = new uPlot({
    width, height: 190, cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [{ ...axis, incrs: STEPS }, { ...axis, ...whole && { incrs: WHOLE }, values: (_, values) => values.map(format), size: 54 }],
    series: [{}, ...series.map(([label, name]) => ({ label, stroke: color(name), width: 2, points: { show: points, size: 4 }, value: (_, value) => value === null ? "–" : format(value) }))],
  }, data, place);
}

// How much of something is used; the text says the same.
function meter(used, whole, text, label) {
  const made = element("span", "", { class: "used" });
  made.append(element("meter", "", { min: 0, max: whole || 1, value: Math.min(used, whole), "aria-label": `${label}: ${text}` }), ` ${text}`);
  return made;
}

// What each feature adds to the log odds that an answer of the semantic cache is wrong.
function oddsOf(features) {
  if (!features.length) return "";
  return `Log odds of a wrong answer: ${features.map(({ name, log_odds }) => `${name} ${log_odds < 0 ? "−" : "+"}${Math.abs(log_odds).toFixed(2)}`).join(", ")}`;
}
