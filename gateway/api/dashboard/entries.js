"use strict";
// Entries with their buttons, the last requests, and why a request is a hit or a miss.

const OWN_ID = /^[^.\s]+\.[0-9a-f]{32}(\.\d+)?$/;
let keyNames = {}, isExampleBody = true;

// A query that is an id is that entry; any other is looked for in the texts of answers.
async function askEntries() {
  const query = get("entries-query").value.trim(), order = get("entries-order").value;
  if (OWN_ID.test(query)) {
    try {
      return { data: [await ask("GET", `/v1/cache/entries/${encodeURIComponent(query)}`)] };
    } catch (error) {
      if (error instanceof Refused) throw error;
      return { data: [], missing: error.message };
    }
  }
  const params = new URLSearchParams({ limit: 10, order: query ? "newest" : order });
  if (query) params.set("text", query);
  const page = await askList(`/v1/cache/entries?${params}`);
  return page.data.length || page.missing ? page : { ...page, missing: query ? "No answer has this text, and no entry this id." : null };
}

async function showEntries() {
  const page = await askEntries();
  const hottest = get("entries-order").value === "hits";
  fill("entries-body", page.data.map(entry => [
    element("code", entry.id), entry.model, count(entry.hits ?? 0), seconds(entry.age) + (entry.stale ? ", stale" : ""),
    count(entry.cost.prompt_tokens + entry.cost.completion_tokens), seconds(entry.cost.seconds),
    Object.entries(entry.options).map(([name, value]) => `${name}=${value}`).join(" ") || "–", evictButton(entry.id),
  ]), page.missing ?? (hottest ? "No entry has been served yet: ask the same thing twice, or look at the newest." : "No entry yet."));
}

function evictButton(id) {
  const button = element("button", "Evict", { type: "button", "aria-label": `Evict ${id}` });
  button.addEventListener("click", () => evictEntry(id, button));
  return button;
}

async function evictEntry(id, button) {
  button.disabled = true;
  try {
    await ask("DELETE", `/v1/cache/entries/${encodeURIComponent(id)}`);
    get("entries-said").textContent = `${id} is evicted.`;
  } catch (error) {
    if (error instanceof Refused) return failed(error);
    get("entries-said").textContent = error.message;
  }
  button.blur(); // its table is shown anew again
  await showEntries().catch(failed);
}

function showRequests(list) {
  fill("requests-body", list.data.map(each => {
    const isHit = each.cache === "hit";
    const actions = element("span", "", { class: "actions" });
    if (each.entry) actions.append(evictButton(each.entry));
    actions.append(explainButton(each));
    const verdict = (each.cache ?? "refused") + (each.layer ? `, ${each.layer}` : "");
    const why = each.error ?? each.reason;
    const tokens = count((each.prompt_tokens ?? 0) + (each.completion_tokens ?? 0)) + (each.estimated ? ", estimated" : "");
    return [
      new Date(each.time * 1000).toLocaleTimeString(), each.model, whoAsked(each),
      element("span", verdict + (why ? `: ${why}` : ""), { class: each.error ? "bad" : "" }),
      seconds(each.first_byte), seconds(each.seconds), tokens, (!isHit && each.upstream) || "–", String(each.status), element("code", each.id), actions,
    ];
  }), list.missing ?? "No request yet.");
}

// A virtual key by its name, else the tenant, whose namespace is long.
function whoAsked(each) {
  const name = each.key ? keyNames[each.key] ?? each.key : each.namespace ?? "–";
  return element("span", (!each.key && name.length > 12 ? `${name.slice(0, 8)}…` : name) + (each.team ? `, ${each.team}` : ""), { title: each.namespace ?? "" });
}

function explainButton(each) {
  const button = element("button", "Explain", { type: "button", "aria-label": `Explain ${each.id}` });
  button.addEventListener("click", () => {
    const path = get("explain-path");
    if ([...path.options].some(option => option.value === each.path)) path.value = each.path;
    get("explain-namespace").value = each.namespace ?? "";
    get("explanation").replaceChildren(element("p", "No text of a request is kept: paste its body above.", { class: "dim" }));
    get("explain").scrollIntoView();
    get("explain-body").focus();
    get("explain-body").select();
  });
  return button;
}

function showExample(routing) {
  const model = routing.upstreams.flatMap(each => each.models ?? [])[0];
  if (!isExampleBody || !model) return;
  get("explain-body").value = JSON.stringify({ model, temperature: 0, messages: [{ role: "user", content: "What is the capital of France?" }] }, null, 1);
}

async function explain() {
  const params = new URLSearchParams({ path: get("explain-path").value });
  const namespace = get("explain-namespace").value.trim();
  if (namespace) params.set("namespace", namespace);
  try {
    showExplanation(await ask("POST", `/v1/cache/explain?${params}`, get("explain-body").value));
  } catch (error) {
    get("explanation").replaceChildren(element("p", error.message, { class: "bad" }));
    if (error instanceof Refused) failed(error);
  }
}

function showExplanation(found) {
  const parts = [element("p", "")];
  parts[0].append("Key ", element("code", found.key));
  for (const layer of found.layers) {
    const line = element("p", `${layer.layer}: `);
    line.append(element("span", layer.verdict, { class: "verdict" }), `: ${layer.reason}${layer.risk === null ? "" : ` (risk ${layer.risk.toFixed(4)})`}`);
    parts.push(line);
    if (layer.features.length) parts.push(element("p", oddsOf(layer.features), { class: "dim" }));
  }
  for (const namespace of found.elsewhere) {
    const line = element("p", "Another tenant has the answer: "), button = element("button", `Explain as ${namespace}`, { type: "button" });
    button.addEventListener("click", () => {
      get("explain-namespace").value = namespace;
      explain();
    });
    line.append(button);
    parts.push(line);
  }
  for (const near of found.nearest) {
    const box = element("div", "", { class: "near" }), list = element("ul");
    box.append(element("code", near.entry.id), ` ${near.entry.model}, ${seconds(near.entry.age)} old`,
      near.similarity === null ? "" : `, similarity ${near.similarity.toFixed(3)}`, near.has_answer === null ? "" : near.has_answer ? ", has the likeliest answer" : ", has another answer", near.veto ? `, veto: ${near.veto}` : "");
    for (const difference of near.differences ?? []) list.append(element("li", said(difference)));
    box.append(list);
    parts.push(box);
  }
  if (!found.nearest.length && found.layers.every(each => each.verdict === "miss" || each.verdict === "off")) {
    parts.push(element("p", `No entry of the tenant ${found.namespace} was asked much the same. Explain beside a request fills in its tenant.`, { class: "dim" }));
  }
  get("explanation").replaceChildren(...parts);
}

function said({ field, change, here, there }) {
  const shown = value => value === undefined || value === null ? "" : ` (${JSON.stringify(value)})`;
  if (change === "added") return `${field}: only in this request${shown(here)}`;
  if (change === "removed") return `${field}: only in the entry's${shown(there)}`;
  if (here === undefined || here === null) return `${field}: differs`;
  if (here === there) return `${field}: another text (${here})`;
  return `${field}: ${JSON.stringify(here)} here, ${JSON.stringify(there)} there`;
}

get("entries-form").addEventListener("submit", event => {
  event.preventDefault();
  get("entries-said").textContent = "";
  showEntries().catch(failed);
});
get("entries-order").addEventListener("change", () => {
  get("entries-query").value = "";
  showEntries().catch(failed);
});
get("explain-form").addEventListener("submit", event => {
  event.preventDefault();
  explain();
});
get("explain-body").addEventListener("input", () => { isExampleBody = false; });
