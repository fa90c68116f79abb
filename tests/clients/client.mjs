// Makes calls with the npm client `openai` and tells as JSON what a program would have seen of each.
//
// Argument: the folder that holds node_modules.
// Standard input, one call a line: {options, path, params, headers, abortAfter}
//   options     for the client: baseURL, apiKey, maxRetries, ...
//   path        which method, such as "chat.completions.create"; params are its parameters
//   abortAfter  leave a stream after so many chunks
// Standard output, one line for each: {value, headers}, {chunks} or {error: {name, status, message, param, code}};
//   the error of a stream comes with the chunks before it.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const { OpenAI } = createRequire(`${process.argv[2]}/`)("openai");

function describe(error) {
  const { status, param, code, message } = error;
  return { name: error.constructor.name, status, message, param, code };
}

async function collect(stream, abortAfter) {
  const chunks = [];
  try {
    for await (const chunk of stream) {
      chunks.push(chunk);
      if (chunks.length === abortAfter) stream.controller.abort();
    }
  } catch (error) {
    return { chunks, error: describe(error) };
  }
  return { chunks };
}

async function call({ options, path, params, headers, abortAfter }) {
  const names = path.split(".");
  const method = names.pop();
  const owner = names.reduce((object, name) => object[name], new OpenAI(options));
  if (method === "stream") {
    return { value: await owner.stream(params, { headers }).finalChatCompletion() };
  }
  const { data, response } = await owner[method](...(params === undefined ? [] : [params]), { headers }).withResponse();
  if (params?.stream) return collect(data, abortAfter);
  return { value: data.data ?? data, headers: Object.fromEntries(response.headers) };
}

for await (const line of createInterface({ input: process.stdin })) {
  const outcome = await call(JSON.parse(line)).catch((error) => ({ error: describe(error) }));
  console.log(JSON.stringify(outcome));
}
