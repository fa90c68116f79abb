"use strict";
// Asks the operator's routes every few seconds while the page is in sight, and writes their answers into the page.

const EVERY = 5000, SLOW_EVERY = 4;
const KEY = "keepgate-admin-key";
const get = id => document.getElementById(id);
const charts = {};
let turn = 0, timer = null, busy = false;

class Refused extends Error {}

async function ask(method, path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["x-keepgate-admin-key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body });
  const decoded = await answer.json().catch(() => ({}));
  if (answer.status === 401 || answer.status === 403) throw new Refused(decoded.error?.message ?? "The admin key is needed.");
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
  const body = get(id), columns = body.closest("table").tHead.rows[0].cells.length;
  const made = rows.map(cells => {
    const row = element("tr");
    for (const cell of cells) {
      const field = element("td");
      field.append(cell ?? "–");
      row.append(field);
    }
    return row;
  });
  if (!made.length) {
    const row = element("tr");
    row.append(element("td", empty, { class: "empty", colspan: columns }));
    made.push(row);
  }
  body.replaceChildren(...made);
}

const count = number => number >= 1e6 ? `${(number / 1e6).toFixed(1)} M` : number >= 1e4 ? `${(number / 1e3).toFixed(1)} k` : String(Math.round(number));
const share = part => `${(100 * part).toFixed(1)} %`;
const dollars = amount => amount === null || amount === undefined ? "–" : amount >= 1 || amount === 0 ? `$${amount.toFixed(2)}` : `$${amount.toFixed(4)}`;
function seconds(time) {
  if (time === null || time === undefined) return "–";
  if (time >= 172800) return `${Math.round(time / 86400)} d`;
  if (time >= 7200) return `${Math.round(time / 3600)} h`;
  if (time >= 120) return `${Math.round(time / 60)} min`;
  if (time >= 1) return `${time.toFixed(1)} s`;
  return `${time >= 0.1 || time === 0 ? Math.round(time * 1000) : (time * 1000).toPrecision(2)} ms`;
}

function showCards(figures) {
  const saved = figures.saved;
  const cards = [
    ["Hit rate", share(figures.hit_rate), `${count(figures.hits)} of ${count(figures.requests)} requests`],
    ["Shared calls", count(figures.shared), "answers that were being computed"],
    ["Computed", count(figures.computed), `${count(figures.prompt_tokens + figures.completion_tokens)} tokens`],
    ["Saved", dollars(saved.dollars), `of ${dollars(figures.cost + saved.dollars)}`],
    ["Time saved", seconds(saved.seconds), `${count(saved.prompt_tokens + saved.completion_tokens)} tokens`],
    ["First byte, hit", seconds(figures.first_byte.hit.p50), `p99 ${seconds(figures.first_byte.hit.p99)}`],
    ["First byte, miss", seconds(figures.first_byte.miss.p50), `p99 ${seconds(figures.first_byte.miss.p99)}`],
    ["Between tokens", seconds(figures.between_tokens.p50), `p99 ${seconds(figures.between_tokens.p99)}`],
    ["Errors", count(figures.errors), `${count(figures.failures)} without the cache, ${count(figures.bypasses)} bypasses`],
  ];
  get("cards").replaceChildren(...cards.map(([name, figure, note]) => {
    const card = element("div", "", { class: "card" });
    card.append(element("span", name), element("b", figure), element("span", note));
    return card;
  }));
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(id, series, data, format, points = false) {
  const place = get(id), width = Math.max(240, place.clientWidth);
  if (charts[id]) {
    charts[id].setData(data);
    return;
  }
  const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  charts[id] = new uPlot({
    width, height: 190, cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [axis, { ...axis, values: (_, values) => values.map(format), size: 46 }],
    series: [{}, ...series.map(([label, name]) => ({ label, stroke: color(name), width: 2, points: { show: points, size: 4 }, value: (_, value) => value === null ? "–" : format(value) }))],
  }, data, place);
}

function showTimeline(points) {
  const times = points.map(point => point.time);
  const of = read => points.map(read);
  draw("requests-chart", [["exact", "--exact"], ["similar", "--similar"], ["shared", "--shared"], ["computed", "--computed"]], [
    times,
    of(point => point.layers.exact.hits),
    of(point => point.layers.normalized.hits + point.layers.semantic.hits),
    of(point => point.shared),
    of(point => point.computed),
  ], count);
  draw("rate-chart", [["hit rate", "--exact"]], [times, of(point => point.requests ? point.hit_rate : null)], share, true);
}

function showLayers(stats, figures) {
  const { exact, semantic } = stats.layers;
  const tiers = Object.entries(exact.tiers).map(([name, tier]) => `${name}: ${tier.available === false ? "away" : `${count(tier.entries ?? 0)} entries`}`);
  fill("layers-body", [
    ["exact", count(figures.layers.exact.hits), share(figures.layers.exact.hit_rate), tiers.join(", ")],
    ["normalized", count(figures.layers.normalized.hits), share(figures.layers.normalized.hit_rate), semantic.mode === "off" ? "off (semantic.mode)" : "on"],
    ["semantic", count(figures.layers.semantic.hits), share(figures.layers.semantic.hit_rate), semantic.mode + (semantic.available === false ? `, away: ${semantic.reason}` : "")],
    ["prefix", count(stats.prefix.prefix_tokens) + " tokens", share(stats.prefix.hit_rate), "of the prompt tokens that upstreams computed"],
  ], "");
  const policy = semantic.policy;
  get("semantic").replaceChildren();
  if (policy && policy.delta !== undefined) {
    const text = `Wrong answers of the semantic cache: ${share(policy.wrong ?? 0)} of requests, at most ${share(policy.wrong_upper ?? 0)} with 95 % confidence; the budget (delta) is ${share(policy.delta)}. ` +
      `${count(policy.labels)} judged answers, ${count(policy.audits ?? 0)} audits, ${count(policy.found_wrong ?? 0)} found wrong, ${count(policy.complaints ?? 0)} complaints.`;
    get("semantic").append(element("p", text, { class: policy.wrong > policy.delta ? "bad" : "dim" }));
  }
}

function showUpstreams(routing) {
  fill("upstreams-body", routing.upstreams.map(each => [
    each.name, element("span", each.state, { class: each.state === "closed" || each.state === "up" ? "" : "verdict" }),
    count(each.in_flight), seconds(each.latency), String(each.weight), each.models === null ? "not told" : each.models.join(", "),
  ]), "No upstream: start the gateway with --upstream URL, or with none for the included model.");
}

function showEntries(page) {
  fill("entries-body", page.data.map(entry => {
    const evict = element("button", "Evict", { type: "button", "aria-label": `Evict ${entry.id}` });
    evict.addEventListener("click", () => evictEntry(entry.id));
    return [
      element("code", entry.id), entry.model, count(entry.hits ?? 0), seconds(entry.age) + (entry.stale ? ", stale" : ""),
      count(entry.cost.prompt_tokens + entry.cost.completion_tokens), seconds(entry.cost.seconds),
      Object.entries(entry.options).map(([name, value]) => `${name}=${value}`).join(" ") || "–", evict,
    ];
  }), "No entry has been served yet: ask the same thing twice.");
}

async function evictEntry(id) {
  try {
    await ask("DELETE", `/v1/cache/entries/${encodeURIComponent(id)}`);
    get("entries-said").textContent = `${id} is evicted.`;
    showEntries(await ask("GET", "/v1/cache/entries?order=hits&limit=10"));
  } catch (error) {
    failed(error);
  }
}

function showKeys(keys, costs) {
  const spent = Object.fromEntries(costs.data.map(row => [row.key, row]));
  const budget = limits => limits.budget_per_day ? `${dollars(limits.budget_per_day)} a day` : limits.budget_per_month ? `${dollars(limits.budget_per_month)} a month` : "–";
  fill("keys-body", keys.data.filter(key => !key.revoked).map(key => {
    const row = spent[key.id];
    return [key.name || key.id, key.team || "–", count(row?.requests ?? 0), count(row?.hits ?? 0), dollars(row?.cost ?? 0), dollars(row?.saving ?? 0), budget(key.limits)];
  }), "No virtual key: make one with `keepgate keys create NAME`.");
}

function showRequests(list) {
  fill("requests-body", list.data.map(each => [
    new Date(each.time * 1000).toLocaleTimeString(), each.model,
    element("span", (each.cache ?? "refused") + (each.layer ? `, ${each.layer}` : "") + (each.error ? `: ${each.error}` : ""), { class: each.error ? "bad" : "" }),
    seconds(each.first_byte), seconds(each.seconds), count((each.prompt_tokens ?? 0) + (each.completion_tokens ?? 0)),
    each.upstream || "–", String(each.status), element("code", each.id),
  ]), "No request yet.");
}

function showExplanation(found) {
  const parts = [element("p", "")];
  parts[0].append("Key ", element("code", found.key));
  for (const layer of found.layers) {
    const line = element("p", `${layer.layer}: `);
    line.append(element("span", layer.verdict, { class: "verdict" }), `: ${layer.reason}${layer.risk === null ? "" : ` (risk ${layer.risk.toFixed(4)})`}`);
    parts.push(line);
  }
  for (const near of found.nearest) {
    const box = element("div", "", { class: "near" }), list = element("ul");
    box.append(element("code", near.entry.id), ` ${near.entry.model}, ${seconds(near.entry.age)} old`,
      near.similarity === null ? "" : `, similarity ${near.similarity.toFixed(3)}`, near.guard ? `, refused by the guard ${near.guard}` : "");
    for (const difference of near.differences ?? []) list.append(element("li", said(difference)));
    box.append(list);
    parts.push(box);
  }
  if (!found.nearest.length) parts.push(element("p", "No entry was asked much the same.", { class: "dim" }));
  get("explanation").replaceChildren(...parts);
}

function said({ field, change, here, there }) {
  const shown = value => value === undefined || value === null ? "" : ` (${JSON.stringify(value)})`;
  if (change === "added") return `${field}: only in this request${shown(here)}`;
  if (change === "removed") return `${field}: only in the entry's${shown(there)}`;
  if (here === undefined || here === there) return `${field}: another text`;
  return `${field}: ${JSON.stringify(here)} here, ${JSON.stringify(there)} there`;
}

function failed(error) {
  if (error instanceof Refused) {
    get("content").hidden = true;
    get("login").hidden = false;
    get("login-error").textContent = sessionStorage.getItem(KEY) ? error.message : "";
    get("state").textContent = "The admin key is needed.";
    clearTimeout(timer);
    return;
  }
  get("state").textContent = error.message;
  get("state").className = "bad";
}

async function refresh() {
  clearTimeout(timer);
  if (busy) return;
  busy = true;
  try {
    const slow = turn++ % SLOW_EVERY === 0;
    const [stats, timeline, requests] = await Promise.all([
      ask("GET", "/v1/cache/stats"), ask("GET", "/v1/cache/timeline?steps=60"), ask("GET", "/v1/requests?limit=20"),
    ]);
    get("login").hidden = true;
    get("content").hidden = false;
    const figures = stats.windows[get("window").value];
    if (figures) {
      showCards(figures);
      showLayers(stats, figures);
    }
    showTimeline(timeline.data);
    showRequests(requests);
    if (slow) {
      showUpstreams(await ask("GET", "/v1/routing"));
      showEntries(await ask("GET", "/v1/cache/entries?order=hits&limit=10"));
      const costs = await ask("GET", "/v1/costs?by=key&since=24h");
      showKeys(await ask("GET", "/v1/keys").catch(() => ({ data: [] })), costs);
    }
    get("state").textContent = `Updated ${new Date().toLocaleTimeString()}`;
    get("state").className = "";
  } catch (error) {
    failed(error);
    if (error instanceof Refused) return;
  } finally {
    busy = false;
  }
  if (!document.hidden) timer = setTimeout(refresh, EVERY);
}

get("login").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, get("admin-key").value);
  turn = 0;
  refresh();
});
get("explain-form").addEventListener("submit", async event => {
  event.preventDefault();
  const params = new URLSearchParams({ path: get("explain-path").value });
  const namespace = get("explain-namespace").value.trim();
  if (namespace) params.set("namespace", namespace);
  try {
    showExplanation(await ask("POST", `/v1/cache/explain?${params}`, get("explain-body").value));
  } catch (error) {
    get("explanation").replaceChildren(element("p", error.message, { class: "bad" }));
    if (error instanceof Refused) failed(error);
  }
});
get("window").addEventListener("change", refresh);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
addEventListener("resize", () => {
  for (const [id, chart] of Object.entries(charts)) chart.setSize({ width: Math.max(240, get(id).clientWidth), height: 190 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const id of Object.keys(charts)) {
    charts[id].destroy();
    delete charts[id];
  }
  refresh();
});
get("explain-body").value = JSON.stringify({ model: "SmolLM2-135M-Instruct", temperature: 0, messages: [{ role: "user", content: "What is the capital of France?" }] }, null, 1);
refresh();
