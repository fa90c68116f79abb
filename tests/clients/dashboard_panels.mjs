// Looks at the panels of engines, of the semantic cache and of budgets, and prints what they showed as JSON.
// Arguments: the folder of node_modules, Chromium's path, the gateway's URL, its admin key, the secret of a virtual key,
// the engine's model.

import { launch, logIn, measured, open, rows, shown } from "./dashboard_page.mjs";

const [modules, executablePath, url, key, secret, model] = process.argv.slice(2);

async function send(body) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${secret}` };
  const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body), signal: AbortSignal.timeout(60_000) });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
}

async function look(page) {
  await page.waitForSelector("#keys-body meter");
  await page.waitForSelector("#engines-body meter");
  await page.waitForSelector("#decisions-body button");
  return {
    engines: await rows(page, "engines-body"),
    others: await page.locator("#engines-others li").allTextContents(),
    drafts: await rows(page, "drafts-body"),
    tiers: await rows(page, "tiers-body"),
    notes: await page.locator("#tiers-notes li").allTextContents(),
    keys: await rows(page, "keys-body"),
    semantic: await page.textContent("#semantic-said"),
    plots: await page.locator("svg[role=img]").evaluateAll(found => found.map(each => each.getAttribute("aria-label"))),
    points: await page.locator("#reliability-plot circle").count(),
    reliability: await rows(page, "reliability-body"),
    whatIf: await rows(page, "what-if-body"),
    decisions: await rows(page, "decisions-body"),
    ...await measured(page),
  };
}

const browser = await launch(modules, executablePath);
const seen = { problems: [], hosts: new Set() };
try {
  const refused = { problems: [], hosts: seen.hosts }; // Chromium itself reports the 401 of the first look
  const page = await open(browser, url, { viewport: { width: 1280, height: 1000 } }, refused);
  await logIn(page, key);
  await shown(page);
  seen.first = await look(page);
  await page.click("#decisions-body button");
  seen.why = (await page.locator("#decision-why p").allTextContents()).join("");
  await page.selectOption("#decisions-filter", { label: "what would be served" });
  await page.waitForSelector("#decisions-body .empty");
  seen.filtered = await page.textContent("#decisions-body");
  const engines = await page.textContent("#engines-body");
  const prediction = { type: "content", content: "One, two, three, four, five, six." };
  await send({ model, max_tokens: 16, messages: [{ role: "user", content: "Count to a hundred." }], prediction });
  await page.waitForFunction(before => document.getElementById("engines-body").textContent !== before, engines);
  await send({ model: "mock", max_tokens: 50, messages: [{ role: "user", content: "Something else" }] });
  await page.reload();
  seen.second = await look(page);
  seen.refused = refused.problems.filter(text => !text.includes("401"));

  for (const [name, options] of Object.entries({
    phone: { viewport: { width: 390, height: 800 } },
    dark: { viewport: { width: 1280, height: 1000 }, colorScheme: "dark" },
  })) {
    const problems = { problems: [], hosts: seen.hosts };
    const other = await open(browser, url, options, problems);
    await logIn(other, key);
    await shown(other);
    seen[name] = await look(other);
    seen.problems.push(...problems.problems.filter(text => !text.includes("401")));
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify({ ...seen, hosts: [...seen.hosts] }));
