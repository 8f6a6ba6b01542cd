// OpenAI's own client for Node, against a server whose address is the argument: basics only.
import OpenAI from "openai";

const [address, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const question = { model, messages: [{ role: "user", content: "how many pens" }], temperature: 0, max_tokens: 20 };

const models = [];
for await (const one of client.models.list()) models.push(one.id);
const whole = await client.chat.completions.create(question);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
let status = null;
try {
  await client.chat.completions.create({ ...question, temperature: 9 });
} catch (error) {
  status = error.status;
}
console.log(JSON.stringify({ models, whole: whole.choices[0].message.content, text, status }));
