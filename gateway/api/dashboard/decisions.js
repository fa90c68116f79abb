"use strict";
// The semantic cache's last decisions with their verdicts, and what it would serve with other budgets.

const MOST_DECISIONS = 10, YOUNG = 7200;
const LINES = ["--exact", "--similar", "--shared", "--computed"];
const OUTCOMES = { served: "served", observed: "would be served", vetoed: "veto", refused: "not served" };
let since = null; // of the figures of other budgets, Unix seconds

async function showDecisions(semantic) {
  const isAway = semantic.mode === "off" || semantic.available === false;
  get("decisions-part").hidden = isAway;
  if (isAway) return;
  // Minutes of a young process, hours of one that has seen some.
  const step = since === null || Date.now() / 1000 - since < YOUNG ? "step=1m&steps=60" : "step=1h&steps=48";
  const [whatIf, page] = await Promise.all([askList(`/v1/cache/semantic/what-if?${step}`), askList(`/v1/cache/semantic/decisions?limit=${MOST_DECISIONS}${get("decisions-filter").value}`)]);
  showWhatIf(whatIf);
  if (!isTouched("decisions")) listDecisions(page);
}

function showWhatIf({ data, delta, missing }) {
  since = data[0]?.since ?? null;
  get("what-if").hidden = !data.length;
  if (!data.length) {
    get("what-if-said").textContent = missing ?? "This policy keeps no budget that could be another one.";
    return;
  }
  const all = data[0].requests, hours = data[0].points[1].time - data[0].points[0].time === 3600;
  get("what-if-said").textContent = `Of the ${count(all)} requests since this process was started; points of hits are ${hours ? "hours" : "minutes"}. What a request that was not served would have got is mostly known, since its own answer was compared; of those that were served, audits know.`;
  fill("what-if-body", data.map(each => [
    each.delta === delta ? element("strong", `${fine(each.delta)}, as set`) : fine(each.delta), count(each.hits), each.requests ? share(each.hits / each.requests) : "–",
    count(each.judged), count(each.found_wrong), element("span", fine(each.wrong), { class: each.wrong > each.delta ? "bad" : "" }), fine(each.wrong_upper),
  ]), "");
  const names = data.map((each, number) => [`delta ${fine(each.delta)}`, LINES[number % LINES.length]]);
  const times = data[0].points.map(point => point.time);
  for (const [id, read, format] of [["what-if-hits", point => point.requests ? point.hits / point.requests : null, share], ["what-if-wrong", point => point.wrong_upper, fine]]) {
    if (charts[id] && charts[id].series.length !== names.length + 1) {
      charts[id].destroy();
      delete charts[id];
    }
    draw(id, names, [times, ...data.map(each => each.points.map(read))], format, { points: true });
  }
}

function listDecisions({ data, missing }) {
  fill("decisions-body", data.map(each => {
    const outcome = element("span", OUTCOMES[each.outcome], { class: each.outcome === "served" || each.outcome === "observed" ? "verdict" : "" });
    if (each.reason) outcome.append(`: ${each.reason}`);
    const isWrong = each.verdict === "different" && (each.outcome === "served" || each.outcome === "observed");
    const verdict = element("span", each.verdict ? `${each.verdict} (${each.source})` : "–", { class: isWrong ? "bad" : "" });
    return [
      new Date(each.time * 1000).toLocaleTimeString(), outcome, verdict, each.similarity.toFixed(3), each.risk === null ? "–" : fine(each.risk), each.limit === null ? "–" : fine(each.limit),
      each.model, element("code", `${each.namespace.slice(0, 8)}${each.namespace.length > 8 ? "…" : ""}`), whyButton(each),
    ];
  }), missing ?? "No question was near to a stored one yet, or none of these.");
}

function whyButton(decision) {
  const button = element("button", "Why?", { type: "button", "aria-label": `Why decision ${decision.id}?` });
  button.addEventListener("click", () => {
    const shown = element("div", "", { class: "near" }), texts = element("p"), features = element("p", "", { class: "dim" });
    if (decision.question === null) texts.append("No texts: the setting semantic.show_questions shows them.");
    else texts.append("Asked: ", element("q", decision.question), element("br"), "Stored: ", element("q", decision.stored_question));
    if (decision.veto) features.append(`Veto: ${decision.veto}. `);
    features.append(oddsOf(decision.features));
    const ids = element("p", "Stored answer: ");
    ids.append(element("code", decision.entry), ", the question's own: ", element("code", decision.key));
    shown.append(texts, ids, features);
    get("decision-why").replaceChildren(shown);
    button.blur(); // the table is shown anew again
  });
  return button;
}

get("decisions-filter").addEventListener("change", async () => {
  try {
    listDecisions(await askList(`/v1/cache/semantic/decisions?limit=${MOST_DECISIONS}${get("decisions-filter").value}`));
  } catch (error) {
    failed(error);
  }
});
