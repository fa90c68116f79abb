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
    ["Saved", dollars(saved.dollars, figures.unpriced), figures.unpriced ? `${count(figures.unpriced)} without a known price` : `of ${dollars(figures.cost + saved.dollars)}`],
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
  const tiers = Object.entries(exact.tiers).map(([name, tier]) => `${name}: ${tier.available === false ? "away" : `${count(tier.entries ?? 0)} ${tier.entries === 1 ? "entry" : "entries"}`}`);
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

function showKeys(keys, costs, budgets) {
  const spent = sumsBy("key", costs.data), ofTeams = sumsBy("team", costs.data);
  const of = Object.fromEntries(budgets.data.map(each => [`${each.kind} ${each.id}`, each]));
  const used = each => Math.max(...[each?.day, each?.month].map(use => use ? use.spent / use.budget : 0));
  const rows = keys.data.filter(key => !key.revoked).map(key => {
    const row = spent[key.id], budget = of[`key ${key.id}`];
    return { order: [used(budget), row?.cost ?? 0], cells: [
      key.name || key.id, key.team || "–", ...sumCells(row),
      showSpent(budget?.day, "today"), showSpent(budget?.month, "this month"),
    ] };
  });
  for (const team of budgets.data.filter(each => each.kind === "team")) {
    rows.push({ order: [used(team), 0], cells: [element("em", "the whole team"), team.name, ...sumCells(ofTeams[team.name]), showSpent(team.day, "today"), showSpent(team.month, "this month")] });
  }
  rows.sort((a, b) => b.order[0] - a.order[0] || b.order[1] - a.order[1]);
  fill("keys-body", rows.slice(0, MOST_KEYS).map(row => row.cells), keys.missing ?? "No virtual key: make one with `keepgate keys create NAME`, and require keys with the setting keys.required.");
  const notes = [];
  if (keys.data.length && keys.required === false) notes.push("This gateway asks for no keys, so no limit or budget holds: set keys.required.");
  if (rows.length > MOST_KEYS) notes.push(`${rows.length - MOST_KEYS} more: keepgate keys list has all.`);
  else if (rows.length && !budgets.data.length) notes.push("No key has a budget: `keepgate keys limits NAME --budget-per-day 5` sets one.");
  get("keys-said").textContent = notes.join(" ");
}

// Of rows by key and team, the sums of each.
function sumsBy(name, rows) {
  const sums = {};
  for (const row of rows) {
    const sum = sums[row[name]] ??= { requests: 0, hits: 0, cost: 0, saving: 0, unpriced: 0 };
    for (const field of Object.keys(sum)) sum[field] += row[field];
  }
  return sums;
}

const sumCells = (sum = { requests: 0, hits: 0, cost: 0, saving: 0, unpriced: 0 }) => [
  count(sum.requests), count(sum.hits), dollars(sum.cost, sum.unpriced), dollars(sum.saving, sum.unpriced),
];

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

function failed(error) {
  if (error instanceof Refused) {
    get("content").hidden = true;
    get("login").hidden = false;
    const isWrong = error.isKeyWrong && sessionStorage.getItem(KEY) !== null;
    get("login-error").textContent = isWrong ? "That is not this gateway's admin key." : error.isKeyWrong ? "" : error.message;
    get("state").textContent = isWrong ? "Wrong admin key." : "The admin key is needed.";
    sessionStorage.removeItem(KEY);
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
    const stats = await ask("GET", "/v1/cache/stats"); // first: without the key all others would be refused as well
    // Awaited last: an upstream that hangs must not hold up the rest.
    const asking = slow || hasEngines() ? askList("/v1/engines") : null;
    asking?.catch(() => null);
    const [requests, timeline] = await Promise.all([askList("/v1/requests?limit=20"), askTimeline()]);
    get("login").hidden = true;
    get("content").hidden = false;
    const figures = stats.windows[get("window").value];
    if (figures) {
      showCards(figures);
      showLayers(stats, figures);
    }
    showTimeline(minutes);
    showSemantic(stats.layers.semantic);
    if (slow) {
      const routing = await ask("GET", "/v1/routing"), keys = await askList("/v1/keys");
      showUpstreams(routing);
      showExample(routing);
      keyNames = Object.fromEntries(keys.data.map(key => [key.id, key.name]));
      showKeys(keys, await askList("/v1/costs?by=key,team&since=24h"), await askList("/v1/budgets"));
      slowAt = now;
    }
    if (slow && !isTouched("entries")) await showEntries();
    if (slow) await showDecisions(stats.layers.semantic);
    if (!isTouched("requests")) showRequests(requests);
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
refresh();
