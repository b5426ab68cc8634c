// The JavaScript clients people have, against a server whose address is in DIPTYCH_URL: openai, Anthropic's, Vercel's ai.
// Each whole and streamed, and in a loop that calls a tool; all must say the same.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // it does not know the model
const url = process.env.DIPTYCH_URL;
const model = "diptych-10m";
const ask = "What is the capital of Finland?";
const messages = [{ role: "user", content: ask }];
const question = "What time is it in Rome?";
const cities = ["Rome", "Oslo"];
const place = z.object({ city: z.enum(cities) });
const description = "the time of a city";

async function openaiChats(openai) {
  const body = { model, messages, temperature: 0 };
  const whole = await openai.chat.completions.create(body);
  const text = whole.choices[0].message.content;
  const chunks = [];
  for await (const chunk of await openai.chat.completions.create({ ...body, stream: true })) chunks.push(chunk);
  assert.deepEqual(chunks[0].choices[0].delta, { role: "assistant", content: "" });
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), text);
  assert.equal(await openai.chat.completions.stream(body).finalContent(), text);
  const held = await openai.chat.completions.parse({ ...body, response_format: zodResponseFormat(place, "place") });
  assert.ok(cities.includes(held.choices[0].message.parsed.city));
  for (const stream of [false, true]) {
    const asked = [];
    const get_time = { name: "get_time", description, parameters: z.toJSONSchema(place), parse: JSON.parse };
    get_time.function = ({ city }) => (asked.push(city), "12:00");
    const runner = openai.chat.completions.runTools({
      ...body, stream, messages: [{ role: "user", content: question }], parallel_tool_calls: false,
      tool_choice: { type: "function", function: { name: "get_time" } }, tools: [{ type: "function", function: get_time }],
    });
    await runner.finalMessage(); // a function that is named is called once; the loop ends with its result
    assert.ok(asked.length === 1 && cities.includes(asked[0]));
  }
  return [text, whole.usage.prompt_tokens];
}

async function openaiResponses(openai, text) {
  const whole = await openai.responses.create({ model, input: ask, temperature: 0 });
  assert.equal(whole.output_text, text);
  const stream = openai.responses.stream({ model, input: ask, temperature: 0 });
  let pieces = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") pieces += event.delta;
  assert.equal(pieces, text);
  assert.equal((await stream.finalResponse()).output_text, text);
  const next = await openai.responses.create({ model, input: "And?", previous_response_id: whole.id, temperature: 0 });
  assert.ok(next.usage.input_tokens > whole.usage.total_tokens);
  const format = zodTextFormat(place, "place");
  const held = await openai.responses.parse({ model, input: ask, temperature: 0, text: { format } });
  assert.ok(cities.includes(held.output_parsed.city));
  const tools = [{ type: "function", name: "get_time", description, parameters: z.toJSONSchema(place), strict: true }];
  const called = await openai.responses.create({
    model, input: question, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0,
  });
  const [call] = called.output.filter((item) => item.type === "function_call");
  assert.ok(cities.includes(JSON.parse(call.arguments).city));
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "12:00" }];
  const told = await openai.responses.create({ model, input, previous_response_id: called.id, tools, tool_choice: "none" });
  assert.equal(told.status, "completed");
}

async function anthropicMessages(anthropic, text, tokens) {
  const body = { model, max_tokens: 50, messages, temperature: 0 };
  assert.equal((await anthropic.messages.create(body)).content[0].text, text);
  assert.equal(await anthropic.messages.stream(body).finalText(), text);
  assert.equal((await anthropic.messages.countTokens({ model, messages })).input_tokens, tokens);
  for (const stream of [false, true]) {
    const asked = [];
    const run = ({ city }) => (asked.push(city), "12:00");
    const runner = anthropic.beta.messages.toolRunner({
      ...body, stream, max_tokens: 150, messages: [{ role: "user", content: question }],
      tools: [betaZodTool({ name: "get_time", description, inputSchema: place, run })],
      tool_choice: { type: "tool", name: "get_time", disable_parallel_tool_use: true }, max_iterations: 2,
    });
    await runner.runUntilDone();
    assert.ok(asked.length >= 1 && asked.every((city) => cities.includes(city)));
  }
}

async function vercelsAi(served, text) {
  const options = { model: served, temperature: 0, maxRetries: 0 };
  assert.equal((await generateText({ ...options, prompt: ask })).text, text);
  let pieces = "";
  for await (const piece of streamText({ ...options, prompt: ask }).textStream) pieces += piece;
  assert.equal(pieces, text);
  const get_time = tool({ description, inputSchema: place, execute: async () => "12:00" });
  const agent = {
    ...options, prompt: question, tools: { get_time }, stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
  for (const steps of [(await generateText(agent)).steps, await streamText(agent).steps]) {
    assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
    assert.ok(cities.includes(steps[0].toolCalls[0].input.city));
  }
  const held = await generateObject({ ...options, schema: place, prompt: "A city" });
  assert.ok(cities.includes(held.object.city));
}

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const [text, tokens] = await openaiChats(openai);
await openaiResponses(openai, text);
await anthropicMessages(new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 }), text, tokens);
const vercelsOpenai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
await vercelsAi(vercelsOpenai(model), text);
await vercelsAi(vercelsOpenai.chat(model), text);
await vercelsAi(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model), text);
console.log("all clients agree");
