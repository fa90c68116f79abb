// Uses the dashboard in headless Chromium as a person would, and prints what it saw as JSON.
// Arguments: the folder of node_modules, Chromium's path, the gateway's URL, its admin key.

import { launch, logIn, measured, open, rows, shown } from "./dashboard_page.mjs";

const [modules, executablePath, url, key] = process.argv.slice(2);

const hitRate = page => page.locator(".card b").first().textContent();
const entries = page => page.locator("#entries-body button").count();

async function send(content) {
  const body = JSON.stringify({ model: "mock", messages: [{ role: "user", content }] });
  await fetch(`${url}/v1/chat/completions`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

const browser = await launch(modules, executablePath);
const seen = { problems: [], hosts: new Set() };
try {
  const refused = { problems: [], hosts: seen.hosts }; // Chromium itself reports the 401 in its console
  const page = await open(browser, url, { viewport: { width: 1280, height: 1000 } }, refused);
  await logIn(page, "wrong");
  await page.waitForFunction(() => document.getElementById("login-error").textContent !== "");
  seen.refusal = [await page.textContent("#login-error"), await page.textContent("#state")];
  seen.refusals = refused.problems.filter(text => text.includes("401")).length;
  await logIn(page, key);
  await shown(page);
  await page.waitForSelector("#engines-others li");
  seen.empty = {
    engines: await rows(page, "engines-body"), others: await page.locator("#engines-others li").allTextContents(), tiers: await rows(page, "tiers-body"),
    keys: await rows(page, "keys-body"), semantic: await page.textContent("#semantic-said"),
    hidden: await page.locator("#semantic-figures, #engines-charts").evaluateAll(found => found.every(each => !each.checkVisibility())),
  };
  seen.before = await hitRate(page);
  for (let turn = 0; turn < 8; turn++) await send("hot");
  await page.waitForFunction(before => document.querySelector(".card b").textContent !== before, seen.before);
  seen.after = await hitRate(page);
  seen.saved = await page.locator(".card", { hasText: /^Saved/ }).textContent();
  seen.verdicts = await page.locator("#requests-body tr").count();

  await page.fill("#explain-body", JSON.stringify({ model: "mock", temperature: 0, messages: [{ role: "user", content: "Hot!" }] }));
  await page.click("#explain-form button");
  await page.waitForSelector("#explanation .near");
  seen.explanation = await page.textContent("#explanation");
  await page.fill("#explain-body", "{");
  await page.click("#explain-form button");
  await page.waitForSelector("#explanation .bad");
  seen.fault = await page.textContent("#explanation");

  await page.waitForSelector("#entries-body button");
  seen.entries = await entries(page);
  await page.selectOption("#entries-order", "newest");
  await page.waitForFunction(() => document.querySelectorAll("#entries-body button").length === 3);
  const [newest] = (await rows(page, "entries-body"))[0];
  await page.fill("#entries-query", newest);
  await page.press("#entries-query", "Enter");
  await page.waitForFunction(() => document.querySelectorAll("#entries-body button").length === 1);
  seen.found = [newest, (await rows(page, "entries-body"))[0][0]];
  await page.fill("#entries-query", "no such text");
  await page.press("#entries-query", "Enter");
  await page.waitForSelector("#entries-body .empty");
  seen.nothing = await page.textContent("#entries-body");
  await page.selectOption("#entries-order", "hits");
  await page.waitForSelector("#entries-body button");
  await page.locator("#entries-body button").first().focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("entries-said").textContent !== "");
  seen.evicted = await page.textContent("#entries-said");
  const cold = page.locator("#requests-body tr", { hasText: "miss" }).first();
  seen.asked = (await cold.locator("td").allTextContents()).slice(1, 4);
  await cold.locator("button", { hasText: "Explain" }).click();
  seen.namespace = await page.inputValue("#explain-namespace");
  await page.evaluate(() => { document.getElementById("entries-said").textContent = ""; });
  await cold.locator("button", { hasText: "Evict" }).click();
  await page.waitForFunction(() => document.getElementById("entries-said").textContent !== "");
  seen.evictedFromRequest = await page.textContent("#entries-said");
  seen.refused = refused.problems.filter(text => !text.includes("401") && !text.includes("400"));

  for (const [name, options] of Object.entries({
    phone: { viewport: { width: 390, height: 800 } },
    dark: { viewport: { width: 1280, height: 1000 }, colorScheme: "dark" },
  })) {
    const other = await open(browser, url, options, { problems: [], hosts: seen.hosts });
    await logIn(other, key);
    await shown(other);
    await other.waitForSelector(".u-over");
    const button = await other.locator("#requests-body button").first().boundingBox();
    seen[name] = { ...await measured(other), right: button.x + button.width };
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify({ ...seen, hosts: [...seen.hosts] }));
