// Asks the site's own search: node ask_search.js WORKER INDEX QUERY... prints a JSON list of the locations found for each query.
// The worker is the theme's, which the page starts and sends these two kinds of messages.
const { readFileSync } = require("fs");
const [worker, index, ...queries] = process.argv.slice(2);
const SETUP = 0, QUERY = 2;
let listen, answer;

globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { listen = listener; };
globalThis.postMessage = (message) => { answer = message.data; };
(0, eval)(readFileSync(worker, "utf8"));

async function tell(type, data) {
  await listen({ data: { type, data } });
  await new Promise(setImmediate);
  return answer;
}

(async () => {
  await tell(SETUP, { ...JSON.parse(readFileSync(index, "utf8")), options: {} });
  const found = [];
  for (const query of queries) found.push((await tell(QUERY, query)).items.map((hits) => hits[0].location));
  console.log(JSON.stringify(found));
})();
