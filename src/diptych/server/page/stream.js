// What the server streams, and what is said when it does not.

// the events of an answer as they come
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// what the browser says of a lost connection differs from one to the next, and in none says what was lost
export const words = (error) => (error instanceof TypeError ? "the connection to the server is lost, or there was none" : error.message);

// what is said of an answer that ended otherwise than by itself
export const endWords = { length: "cut off: max tokens or the end of the context was reached", abort: "ended by another" };
