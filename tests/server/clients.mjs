// The JavaScript clients people have, against a server whose address is in DIPTYCH_URL: openai, Anthropic's, Vercel's ai.
import assert from "node:assert/strict";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

const url = process.env.DIPTYCH_URL;
const model = "diptych-10m";
const ask = "What is the capital of Finland?";

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const whole = await openai.responses.create({ model, input: ask, temperature: 0 });
const stream = openai.responses.stream({ model, input: ask, temperature: 0 });
let text = "";
for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
assert.equal(text, whole.output_text);
assert.equal((await stream.finalResponse()).output_text, text);
const next = await openai.responses.create({ model, input: "And?", previous_response_id: whole.id, temperature: 0 });
assert.ok(next.usage.input_tokens > whole.usage.total_tokens);

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const body = { model, max_tokens: 50, messages: [{ role: "user", content: ask }], temperature: 0 };
const message = await anthropic.messages.create(body);
assert.equal(message.content[0].text, text);
assert.equal((await anthropic.messages.stream(body).finalMessage()).content[0].text, text);
const count = await anthropic.messages.countTokens({ model, messages: body.messages });
assert.equal(count.input_tokens, whole.usage.input_tokens);

const served = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(model);
const options = { model: served, temperature: 0, maxRetries: 0 };
assert.equal((await generateText({ ...options, prompt: ask })).text, text);
const streamed = streamText({ ...options, prompt: ask });
let pieces = "";
for await (const piece of streamed.textStream) pieces += piece;
assert.equal(pieces, text);
const city = z.object({ city: z.enum(["Rome", "Oslo"]) });
const get_time = tool({ description: "the time of a city", inputSchema: city, execute: async () => "12:00" });
const agent = {
  ...options,
  prompt: "What time is it in Rome?",
  tools: { get_time },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};
for (const steps of [(await generateText(agent)).steps, await streamText(agent).steps]) {
  assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  assert.ok(["Rome", "Oslo"].includes(steps[0].toolCalls[0].input.city));
}
const held = await generateObject({ ...options, schema: z.object({ name: z.enum(["Paris", "Rome"]) }), prompt: "A city" });
assert.ok(["Paris", "Rome"].includes(held.object.name));
console.log("all clients agree");
