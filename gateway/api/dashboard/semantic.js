"use strict";
// The semantic cache: wrong answers against the budget, and whether predicted risks come true.

const SVG = "http://www.w3.org/2000/svg";
const TICKS = [0, 0.001, 0.01, 0.05, 0.2, 0.5, 1];
const PLOT = { width: 380, height: 340, left: 52, right: 24, top: 12, bottom: 44 };
// Shares from a thousandth to one in sight, and zero as well.
const root = part => Math.cbrt(Math.max(0, Math.min(1, part)));

function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function showSemantic(semantic) {
  const { policy, reliability = [] } = semantic;
  get("semantic-figures").hidden = true;
  if (semantic.mode === "off") return saySemantic("The semantic cache is off. Set semantic.mode to observe (--semantic observe): it then counts what it would serve and how much of that would be wrong, and serves nothing.");
  if (semantic.available === false) return saySemantic(`The semantic cache does not answer: ${semantic.reason}`, "bad");
  if (policy?.most_risk === undefined) return saySemantic("This policy predicts no risk that could be compared. Set semantic.policy to budget, which keeps the share of wrong answers at or below semantic.delta.");
  const judged = `${count(policy.labels)} judged answers, ${count(policy.audits)} audits, ${count(policy.found_wrong)} found wrong, ${count(policy.complaints)} complaints`;
  const serving = policy.labels < policy.warm_labels ? `It serves nothing before ${policy.warm_labels} judgements of your own traffic.`
    : policy.most_risk === 0 ? "No answer is served now: the budget is spent, or no question was near enough."
    : `Answers are served up to a risk of ${fine(policy.most_risk)}.`;
  saySemantic(`${semantic.mode === "observe" ? "It observes and serves nothing. " : ""}${judged}. ${serving}`);
  get("semantic-figures").hidden = false;
  get("budget-plot").replaceChildren(budgetPlot(policy));
  get("reliability-plot").replaceChildren(reliabilityPlot(policy, reliability));
  fill("reliability-body", reliability.map(each => [
    `${fine(each.above)} to ${fine(each.up_to)}`, fine(each.predicted), element("span", fine(each.observed), { class: isTooLow(each) ? "bad" : "" }),
    `${fine(each.low)} to ${fine(each.high)}`, count(each.labels), count(each.audits),
  ]), "No answer was judged yet: that needs a question near to an earlier one whose answer is computed all the same.");
  const low = reliability.filter(isTooLow).length;
  const corrected = `What is served reckons with ${policy.inflation.toFixed(2)} times the predicted risk, a factor that judgements correct.`;
  get("reliability-said").textContent = !reliability.length ? "" : low
    ? `In ${low} of ${reliability.length} classes of risk more was wrong than predicted. ${corrected}`
    : `In no class of risk more was wrong than predicted. ${corrected}`;
}

// More was wrong than chance alone explains.
const isTooLow = each => each.low > each.predicted;

function saySemantic(text, kind = "dim") {
  get("semantic-said").textContent = text;
  get("semantic-said").className = kind;
}

function budgetPlot(policy) {
  const { width, left, right } = PLOT, height = 120, most = Math.max(2.5 * policy.delta, Math.min(1.1 * policy.wrong_upper, 5 * policy.delta), 1.1 * policy.wrong);
  const x = part => left + (width - left - right) * Math.min(1, part / most);
  const rows = [["all", policy.wrong, policy.wrong_upper], ["recent", policy.recent_wrong, policy.recent_wrong_upper]];
  const label = rows.map(([name, wrong, upper]) => `${name}: ${fine(wrong)} of requests got a wrong answer, at most ${fine(upper)} with 95 % confidence`).join("; ");
  const plot = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": `${label}; the budget (delta) is ${fine(policy.delta)}` });
  plot.append(drawn("line", { x1: x(policy.delta), x2: x(policy.delta), y1: 18, y2: 92, class: "limit" }), drawn("text", { x: x(policy.delta), y: 12, "text-anchor": "middle" }, `delta ${fine(policy.delta)}`));
  rows.forEach(([name, wrong, upper], number) => {
    const y = 38 + 36 * number, kind = wrong > policy.delta ? " over" : "";
    plot.append(
      drawn("text", { x: 4, y: y + 4 }, name), drawn("line", { x1: left, x2: width - right, y1: y, y2: y, class: "axis" }),
      drawn("line", { x1: x(wrong), x2: x(upper), y1: y, y2: y, class: `interval${kind}` }), drawn("circle", { cx: x(wrong), cy: y, r: 5, class: `point${kind}` }),
      drawn("text", { x: width - right, y: y + 16, "text-anchor": "end" }, `${fine(wrong)}, at most ${fine(upper)}`),
    );
  });
  plot.append(drawn("text", { x: left, y: 114 }, "0 %"), drawn("text", { x: width - right, y: 114, "text-anchor": "end" }, fine(most)));
  return plot;
}

function reliabilityPlot(policy, classes) {
  const { width, height, left, right, top, bottom } = PLOT;
  const x = part => left + (width - left - right) * root(part), y = part => height - bottom - (height - top - bottom) * root(part);
  const said = classes.map(each => `predicted ${fine(each.predicted)}, observed ${fine(each.observed)} of ${each.labels}`).join("; ");
  const plot = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": `Predicted risk and what was observed: ${said || "nothing yet"}` });
  for (const tick of TICKS) {
    plot.append(
      drawn("line", { x1: x(tick), x2: x(tick), y1: y(0), y2: y(1), class: "axis" }), drawn("line", { x1: x(0), x2: x(1), y1: y(tick), y2: y(tick), class: "axis" }),
      drawn("text", { x: x(tick), y: height - bottom + 15, "text-anchor": "middle" }, fine(tick)), drawn("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, fine(tick)),
    );
  }
  plot.append(
    drawn("line", { x1: x(0), x2: x(1), y1: y(0), y2: y(1), class: "diagonal" }),
    drawn("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, "predicted risk"),
    drawn("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }, "observed to be wrong"),
  );
  const limit = policy.most_risk / policy.inflation;
  if (limit > 0) plot.append(drawn("line", { x1: x(limit), x2: x(limit), y1: y(0), y2: y(1), class: "limit" }), drawn("text", { x: x(limit) - 4, y: y(1) + 12, "text-anchor": "end" }, "served up to here"));
  classes.forEach((each, number) => {
    const kind = isTooLow(each) ? " over" : "", at = x(each.predicted);
    const above = y(each.high) - 5 - 10 * (number % 2), isInside = above > top + 8; // by turns higher, or neighbours overlap
    const point = drawn("circle", { cx: at, cy: y(each.observed), r: 3 + Math.min(6, Math.log10(each.labels) * 1.6), class: `point${kind}` });
    point.append(drawn("title", {}, `predicted ${fine(each.predicted)}, observed ${fine(each.observed)} (${fine(each.low)} to ${fine(each.high)}), ${each.labels} judged`));
    plot.append(
      drawn("line", { x1: at, x2: at, y1: y(each.low), y2: y(each.high), class: `interval${kind}` }), point,
      drawn("text", { x: isInside ? at : at - 12, y: isInside ? above : y(each.observed) + 4, "text-anchor": isInside ? "middle" : "end", class: "number" }, count(each.labels)),
    );
  });
  return plot;
}
