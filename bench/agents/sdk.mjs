// OpenAI's SDK for Node: a chat, a stream and a response. node sdk.mjs BASE MODEL
import { createRequire } from "node:module";

const { OpenAI } = createRequire(`${process.env.NODE_PATH}/`)("openai");
const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Which colour has the sky?" }];
await client.chat.completions.create({ model, messages, max_tokens: 8 });
for await (const part of await client.chat.completions.create({ model, messages, stream: true })) {
  if (part.object !== "chat.completion.chunk") throw new Error(part.object);
}
const response = await client.responses.create({ model, input: messages, max_output_tokens: 8 });
if (!response.output_text) throw new Error(JSON.stringify(response));
