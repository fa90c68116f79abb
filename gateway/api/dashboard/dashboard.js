"use strict";
// Asks the operator's routes every few seconds while the page is in sight, and writes their answers into the page.

const EVERY = 5000, IDLE_EVERY = 10000, SLOW = 20000, MINUTES = 60, MOST_KEYS = 50;
let timer = null, busy = false, minutes = [], asked = -Infinity, slowAt = -Infinity, requestsBefore = null;

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

// The gateway is asked for all minutes once, and then for those that may have changed; what is wrong, if anything is.
async function askTimeline() {
  const now = performance.now(), passed = Math.ceil((now - asked) / 60000) + 1; // not by the clocks, which may differ
  const { data, missing } = await askList(`/v1/cache/timeline?steps=${Math.min(MINUTES, passed)}`);
  if (missing) return missing;
  asked = now;
  const known = minutes.filter(point => point.time < data[0].time);
  minutes = [...known, ...data].slice(-MINUTES);
  return null;
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
  ], count, { whole: true });
  draw("rate-chart", [["hit rate", "--exact"]], [times, of(point => point.requests ? point.hit_rate : null)], share, { points: true });
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
  }), page.missing ?? "No entry has been served yet: ask the same thing twice.");
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

function showKeys(keys, costs, budgets) {
  const spent = Object.fromEntries(costs.data.map(row => [row.key, row]));
  const of = Object.fromEntries(budgets.data.map(each => [`${each.kind} ${each.id}`, each]));
  const used = each => Math.max(...[each?.day, each?.month].map(use => use ? use.spent / use.budget : 0));
  const rows = keys.data.filter(key => !key.revoked).map(key => {
    const row = spent[key.id], budget = of[`key ${key.id}`];
    return { order: [used(budget), row?.cost ?? 0], cells: [
      key.name || key.id, key.team || "–", count(row?.requests ?? 0), count(row?.hits ?? 0), dollars(row?.cost ?? 0), dollars(row?.saving ?? 0),
      showSpent(budget?.day, "today"), showSpent(budget?.month, "this month"),
    ] };
  });
  for (const team of budgets.data.filter(each => each.kind === "team")) {
    rows.push({ order: [used(team), 0], cells: [element("em", "the whole team"), team.name, "–", "–", "–", "–", showSpent(team.day, "today"), showSpent(team.month, "this month")] });
  }
  rows.sort((a, b) => b.order[0] - a.order[0] || b.order[1] - a.order[1]);
  fill("keys-body", rows.slice(0, MOST_KEYS).map(row => row.cells), keys.missing ?? "No virtual key: make one with `keepgate keys create NAME`, and require keys with the setting keys.required.");
  const budgetless = rows.length && !budgets.data.length ? "No key has a budget: `keepgate keys limits NAME --budget-per-day 5` sets one." : "";
  get("keys-said").textContent = rows.length > MOST_KEYS ? `${rows.length - MOST_KEYS} more: keepgate keys list has all.` : budgetless;
}

function showSpent(use, when) {
  if (!use) return "no budget";
  const text = `${dollars(use.spent)} of ${dollars(use.budget)}`;
  const shown = meter(use.spent, use.budget, text, `spent ${when}`);
  if (use.spent >= use.budget) shown.classList.add("bad");
  shown.title = `Begins anew ${new Date(use.ends * 1000).toLocaleString()}`;
  return shown;
}

// What needs Redis: without one, or while it is away, the message of the gateway says what to do.
async function askList(path) {
  try {
    return await ask("GET", path);
  } catch (error) {
    if (error instanceof Refused) throw error;
    return { data: [], missing: error.message };
  }
}

function showRequests(list) {
  fill("requests-body", list.data.map(each => [
    new Date(each.time * 1000).toLocaleTimeString(), each.model,
    element("span", (each.cache ?? "refused") + (each.layer ? `, ${each.layer}` : "") + (each.error ? `: ${each.error}` : ""), { class: each.error ? "bad" : "" }),
    seconds(each.first_byte), seconds(each.seconds), count((each.prompt_tokens ?? 0) + (each.completion_tokens ?? 0)),
    each.upstream || "–", String(each.status), element("code", each.id),
  ]), list.missing ?? "No request yet.");
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

// What is away is named, and the rest is shown all the same.
async function refresh() {
  clearTimeout(timer);
  if (busy) return;
  busy = true;
  let pause = EVERY;
  try {
    const now = performance.now(), slow = now - slowAt >= SLOW;
    // Awaited last: an upstream that hangs must not hold up the rest.
    const asking = slow || hasEngines() ? askList("/v1/engines") : null;
    asking?.catch(() => null);
    const [stats, requests, timeline] = await Promise.all([ask("GET", "/v1/cache/stats"), askList("/v1/requests?limit=20"), askTimeline()]);
    get("login").hidden = true;
    get("content").hidden = false;
    const figures = stats.windows[get("window").value];
    if (figures) {
      showCards(figures);
      showLayers(stats, figures);
    }
    showTimeline(minutes);
    showSemantic(stats.layers.semantic);
    showRequests(requests);
    if (slow) {
      showUpstreams(await ask("GET", "/v1/routing"));
      showEntries(await askList("/v1/cache/entries?order=hits&limit=10"));
      showKeys(await askList("/v1/keys"), await askList("/v1/costs?by=key&since=24h"), await askList("/v1/budgets"));
      slowAt = now;
    }
    const engines = await asking;
    if (engines) showEngines(engines);
    const missing = timeline ?? requests.missing, total = stats.windows.all?.requests ?? null;
    get("state").textContent = missing ?? `Updated ${new Date().toLocaleTimeString()}`;
    get("state").className = missing ? "bad" : "";
    const isBusy = engines?.data.some(each => each.engine && each.engine.batch.running + each.engine.batch.waiting > 0);
    if (total === requestsBefore && !isBusy) pause = IDLE_EVERY;
    requestsBefore = total;
  } catch (error) {
    failed(error);
    if (error instanceof Refused) return;
  } finally {
    busy = false;
  }
  if (!document.hidden) timer = setTimeout(refresh, pause);
}

get("login").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, get("admin-key").value);
  asked = slowAt = -Infinity;
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
