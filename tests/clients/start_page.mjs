// Opens the page at / of a gateway that asks for keys, without one and then with one, and prints what it saw as JSON.
// Arguments: the folder of node_modules, Chromium's path, the gateway's URL, its admin key, the secret of a virtual key.

import { launch } from "./dashboard_page.mjs";

const [modules, executablePath, url, , secret] = process.argv.slice(2);

const browser = await launch(modules, executablePath);
const seen = { problems: [] };
try {
  const page = await browser.newPage();
  page.on("pageerror", error => seen.problems.push(String(error)));
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("models-said").textContent !== "");
  seen.label = await page.textContent("#key-label");
  seen.said = await page.textContent("#models-said");
  seen.validation = await page.evaluate(() => document.getElementById("model").validationMessage);
  await page.fill("#key", secret);
  await page.press("#key", "Tab");
  await page.waitForFunction(() => document.getElementById("model").options.length > 0);
  seen.models = await page.locator("#model option").allTextContents();
  seen.after = await page.textContent("#models-said");
  await page.click("#send");
  await page.waitForFunction(() => document.querySelector("#verdict td") !== null);
  seen.answer = await page.textContent("#answer");
} finally {
  await browser.close();
}
console.log(JSON.stringify(seen));
