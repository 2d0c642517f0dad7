// Ask llama.cpp, through the package node-llama-cpp, for tokens, greedy answers and log-probs of a GGUF file.
//
//   node gguf.mjs REQUEST ANSWER        from a folder in which node-llama-cpp is installed
//
// REQUEST: {"model": file, "threads": n, "texts": [text], "prompts": [[id]], "answer_tokens": n, "sequences": [[id]]}
// ANSWER:  {"llama_cpp": release, "tokens": [[id]], "answers": [[id]], "logprobs": [[nats of sequence[1:]]]}
import {readFile, writeFile} from "node:fs/promises";
import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";

const require = createRequire(path.join(process.cwd(), "package.json"));
const entry = require.resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);

const [requestFile, answerFile] = process.argv.slice(2);
const request = JSON.parse(await readFile(requestFile, "utf8"));
const llama = await getLlama({gpu: false, build: "never", maxThreads: request.threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: request.model, checkTensors: true});
const context = await model.createContext({contextSize: request.context, threads: request.threads});
const sequence = context.getSequence();

const tokens = request.texts.map((text) => model.tokenize(text, true));

const answers = [];
for (const prompt of request.prompts) {
    await sequence.clearHistory();
    const answer = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        answer.push(token);
        if (model.isEogToken(token) || answer.length === request.answer_tokens)
            break;
    }
    answers.push(answer);
}

const logprobs = [];
for (const ids of request.sequences) {
    await sequence.clearHistory();
    const input = ids.slice(0, -1).map((id) => [id, {generateNext: {probabilities: true, options: {temperature: 0}}}]);
    const outputs = await sequence.controlledEvaluate(input);
    logprobs.push(outputs.map((output, index) => Math.log(output.next.probabilities.get(ids[index + 1]))));
}

await writeFile(answerFile, JSON.stringify({llama_cpp: llama.llamaCppRelease.release, tokens, answers, logprobs}));
await llama.dispose();
