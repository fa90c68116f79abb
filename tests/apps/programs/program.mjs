// What the npm programs have in common; see program.py.
//
// Arguments: the folder that holds node_modules, and {url, key, model, only, via} as JSON.
// Standard output: one line of JSON, {check: what came of it}.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const given = JSON.parse(process.argv[3]);
export const root = given.url;
export const v1 = `${given.url}/v1`;
export const { key, model } = given;

const require = createRequire(`${process.argv[2]}/`);
// A package's entry for `import`, which `require.resolve` alone would miss.
export async function load(name) {
  return import(pathToFileURL(require.resolve(name)));
}

export const CHAT = "Say hello.";
export const STREAM = "Say goodbye.";
export const WEATHER = "What is the weather in Paris?";
export const CITY = "Which city is it?";
export const LIMIT = 64;
export const citySchema = {
  type: "object",
  properties: { capital: { type: "boolean" } },
  required: ["capital"],
  additionalProperties: false,
};
export const weatherFunction = {
  name: "get_weather",
  description: "The weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
export const weather = ({ city }) => `Sunny in ${city}.`;
export const messages = (text) => [{ role: "user", content: text }];

export async function run(checks) {
  const told = {};
  for (const [name, check] of Object.entries(checks)) {
    if (!given.only || given.only.includes(name)) told[name] = await check();
  }
  console.log(JSON.stringify(told));
}
