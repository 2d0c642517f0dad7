// Ask llama.cpp, through the package node-llama-cpp, for tokens, greedy answers and log-probs of a GGUF file.
//
//   node gguf.mjs REQUEST ANSWER        from a folder in which node-llama-cpp is installed
//
// REQUEST: {"model": file, "threads": n, "texts": [text], "prompts": [[id]], "answer_tokens": n, "context": n,
//           "sequences": [[id]], "starts": [index of the first token that is scored]}
// ANSWER:  {"llama_cpp": release, "tokens": [[id]], "answers": [[id]], "logprobs": [[nats of sequence[start:]]]}
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
for (const [number, ids] of request.sequences.entries()) {
    await sequence.clearHistory();
    const start = request.starts[number];
    const scored = (index) => index >= start - 1;
    const options = {generateNext: {probabilities: true, options: {temperature: 0}}};
    const input = ids.slice(0, -1).map((id, index) => scored(index) ? [id, options] : id);
    const outputs = await sequence.controlledEvaluate(input);
    const scores = [];
    for (let index = start - 1; index < ids.length - 1; index++)
        scores.push(Math.log(outputs[index].next.probabilities.get(ids[index + 1])));
    logprobs.push(scores);
}

await writeFile(answerFile, JSON.stringify({llama_cpp: llama.llamaCppRelease.release, tokens, answers, logprobs}));
await llama.dispose();
