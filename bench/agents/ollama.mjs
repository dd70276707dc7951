// Ollama's SDK for JavaScript: its lists, a chat, a stream and a completion. node ollama.mjs BASE MODEL
import { createRequire } from "node:module";

const { Ollama } = createRequire(`${process.env.NODE_PATH}/`)("ollama");
const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "Which colour has the sky?" }];
const [listed] = (await client.list()).models;
if (listed.name !== model) throw new Error(listed.name);
await client.show({ model });
const whole = await client.chat({ model, messages, options: { num_predict: 8 } });
if (!whole.message.content) throw new Error(JSON.stringify(whole));
let last;
for await (const part of await client.chat({ model, messages, stream: true, keep_alive: "5m" })) last = part;
if (!last.done || !last.eval_count) throw new Error(JSON.stringify(last));
await client.generate({ model, prompt: messages[0].content, system: "Be brief.", format: "json" });
