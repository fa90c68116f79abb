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
  seen.refusal = await page.textContent("#login-error");
  await logIn(page, key);
  await shown(page);
  await page.waitForSelector("#engines-others li");
  seen.empty = {
    engines: await rows(page, "engines-body"), others: await page.locator("#engines-others li").allTextContents(), tiers: await rows(page, "tiers-body"),
    keys: await rows(page, "keys-body"), semantic: await page.textContent("#semantic-said"),
    hidden: await page.locator("#semantic-figures, #engines-charts").evaluateAll(found => found.every(each => each.hidden)),
  };
  seen.before = await hitRate(page);
  for (let turn = 0; turn < 8; turn++) await send("hot");
  await page.waitForFunction(before => document.querySelector(".card b").textContent !== before, seen.before);
  seen.after = await hitRate(page);
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
  await page.locator("#entries-body button").first().focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("entries-said").textContent !== "");
  seen.evicted = await page.textContent("#entries-said");
  seen.refused = refused.problems.filter(text => !text.includes("401") && !text.includes("400"));

  for (const [name, options] of Object.entries({
    phone: { viewport: { width: 390, height: 800 } },
    dark: { viewport: { width: 1280, height: 1000 }, colorScheme: "dark" },
  })) {
    const other = await open(browser, url, options, { problems: [], hosts: seen.hosts });
    await logIn(other, key);
    await shown(other);
    await other.waitForSelector(".u-over");
    seen[name] = await measured(other);
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify({ ...seen, hosts: [...seen.hosts] }));
