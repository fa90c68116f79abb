// The dashboard in headless Chromium: a page that notes what goes wrong, and an operator who logs in.

import { createRequire } from "node:module";

const args = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"];
const timeout = 30_000;

export async function launch(modules, executablePath) {
  const { chromium } = createRequire(`${modules}/`)("playwright-core");
  return chromium.launch({ executablePath, args });
}

export async function open(browser, url, options, seen) {
  const page = await (await browser.newContext(options)).newPage();
  page.setDefaultTimeout(timeout);
  page.on("console", message => { if (["error", "warning"].includes(message.type())) seen.problems.push(`${message.text()} ${message.location().url}`); });
  page.on("pageerror", error => seen.problems.push(String(error)));
  page.on("request", request => seen.hosts.add(new URL(request.url()).host));
  await page.goto(`${url}/dashboard`);
  return page;
}

export const shown = page => page.waitForSelector("#content:not([hidden])");

export async function logIn(page, entered) {
  await page.waitForSelector("#login:not([hidden])");
  await page.fill("#admin-key", entered);
  await page.press("#admin-key", "Enter");
}

// The text of each field of a table.
export const rows = (page, id) => page.locator(`#${id} tr`).evaluateAll(found => found.map(row => [...row.cells].map(cell => cell.innerText)));

export const measured = page => page.evaluate(() => ({
  overflow: document.documentElement.scrollWidth - innerWidth,
  background: getComputedStyle(document.body).backgroundColor,
  charts: document.querySelectorAll(".uplot canvas").length,
}));
