/* What llama.cpp does with a GGUF file.
 *
 * peer MODEL THREADS start TOKENS CONTEXT KV
 * peer MODEL THREADS text FILE LENGTH
 * peer MODEL THREADS prompts FILE TOKENS [LOGITS]
 * peer MODEL THREADS ids FILE TOKENS [LOGITS]
 *
 * The first prints, as a line of JSON, the seconds from the start of the program to its readiness
 * and to the logits of a prompt of TOKENS, those that the prompt takes when everything is in place,
 * and the anonymous memory; KV is f32, f16 or q8_0. The second prints the number of tokens of a
 * text and its perplexity, cut into sequences of LENGTH from an empty cache, the third the ids of a
 * greedy continuation of each line that is not empty; it writes the logits that each id was taken
 * from to the file LOGITS, as floats of this machine. The fourth does so with lines of ids, which a
 * model without a tokenizer has too, and the logits of the ids of a line come before. */
#include "llama.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONTEXT = 4096, IDS = 1 << 20, START_RUNS = 5 };

static llama_token ids[IDS];

static void fail(const char * what) {
    fprintf(stderr, "peer: %s\n", what);
    exit(1);
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec + 1e-9 * (double) now.tv_nsec;
}

static long anonymous_bytes(void) {
    char line[256];
    long kibibytes = -1;
    FILE * status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "RssAnon: %ld", &kibibytes);
    if (status) fclose(status);
    return kibibytes < 0 ? -1 : kibibytes * 1024;
}

static char * read_file(const char * path) {
    FILE * file = fopen(path, "rb");
    if (!file) fail("the file cannot be opened");
    size_t size = 0, room = 1 << 16;
    char * text = malloc(room + 1);
    while (text) {
        size += fread(text + size, 1, room - size, file);
        if (size < room) break;
        room *= 2;
        text = realloc(text, room + 1);
    }
    if (!text) fail("no memory");
    fclose(file);
    text[size] = 0;
    return text;
}

static int tokenize(const struct llama_vocab * vocab, const char * text, bool special) {
    int count = llama_tokenize(vocab, text, (int) strlen(text), ids, IDS, false, special);
    if (count < 0) fail("the text cannot be tokenized");
    return count;
}

/* Runs ids at positions from first on; every token's logits are kept. */
static void decode(struct llama_context * context, const llama_token * ids, int count, int first) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) fail("llama_decode failed");
    llama_batch_free(batch);
}

static double log_probability(const float * logits, int count, int id) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++) largest = fmax(largest, logits[i]);
    for (int i = 0; i < count; i++) sum += exp(logits[i] - largest);
    return logits[id] - largest - log(sum);
}

static int ascending(const void * left, const void * right) {
    double a = *(const double *) left, b = *(const double *) right;
    return (a > b) - (a < b);
}

/* Runs ids from an empty cache up to the last one's logits and returns the time at the end. */
static double run_prompt(struct llama_context * context, int count) {
    if (llama_decode(context, llama_batch_get_one(ids, count))) fail("llama_decode failed");
    if (!llama_get_logits_ith(context, -1)) fail("there are no logits");
    return seconds();
}

static void measure_start(struct llama_context * context, int count, double begun) {
    const struct llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    double ready = seconds(), again[START_RUNS];
    for (int i = 0; i < count; i++) ids[i] = (i * 7919 + 11) % llama_vocab_n_tokens(vocab);
    double first = run_prompt(context, count);
    for (int i = 0; i < START_RUNS; i++) {
        llama_memory_clear(llama_get_memory(context), false);
        double start = seconds();
        again[i] = run_prompt(context, count) - start;
    }
    qsort(again, START_RUNS, sizeof *again, ascending);
    printf("{\"ready_seconds\": %.6f, \"first_logits_seconds\": %.6f, \"compute_seconds\": %.6f, "
           "\"anonymous_bytes\": %ld}\n",
           ready - begun, first - begun, again[START_RUNS / 2], anonymous_bytes());
}

static void perplexity(struct llama_context * context, const char * text, int number) {
    const struct llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    int width = llama_vocab_n_tokens(vocab);
    int count = tokenize(vocab, text, false), predicted = 0;
    double sum = 0;
    for (int start = 0; start < count; start += number) {
        int length = count - start < number ? count - start : number;
        llama_memory_clear(llama_get_memory(context), true);
        decode(context, ids + start, length, 0);
        for (int i = 0; i + 1 < length; i++, predicted++)
            sum += log_probability(llama_get_logits_ith(context, i), width, ids[start + i + 1]);
    }
    if (!predicted) fail("the text is too short");
    printf("%d %.6f\n", count, exp(-sum / predicted));
}

/* The ids of a line, which are written as numbers. */
static int parse_ids(const struct llama_vocab * vocab, const char * line) {
    int count = 0, width = llama_vocab_n_tokens(vocab);
    while (line[strspn(line, " \r")]) {
        char * end;
        long id = strtol(line, &end, 10);
        if (end == line || id < 0 || id >= width) fail("an id is no number or has no token");
        if (count == CONTEXT) fail("a line has too many ids");
        ids[count++] = (llama_token) id;
        line = end;
    }
    if (!count) fail("a line has no ids");
    return count;
}

static void keep(FILE * file, const float * logits, int width) {
    if (!logits) fail("there are no logits");
    if (file && fwrite(logits, sizeof *logits, (size_t) width, file) != (size_t) width)
        fail("the logits cannot be written");
}

static void continuations(
    struct llama_context * context, char * text, bool of_ids, int number, FILE * file
) {
    const struct llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    int width = llama_vocab_n_tokens(vocab);
    for (char * line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        int count = of_ids ? parse_ids(vocab, line) : tokenize(vocab, line, true);
        if (count + number > CONTEXT) fail("a prompt is too long");
        llama_memory_clear(llama_get_memory(context), true);
        decode(context, ids, count, 0);
        int last = count - 1;
        for (int i = 0; of_ids && i < last; i++)
            keep(file, llama_get_logits_ith(context, i), width);
        for (int made = 0; made < number; made++) {
            const float * logits = llama_get_logits_ith(context, last);
            keep(file, logits, width);
            llama_token best = 0;
            for (int id = 1; id < width; id++) if (logits[id] > logits[best]) best = id;
            printf("%d ", best);
            if (llama_vocab_is_eog(vocab, best) || made + 1 == number) break;
            decode(context, &best, 1, count + made);
            last = 0;
        }
        printf("\n");
    }
}

static enum ggml_type kv_type(const char * name) {
    const enum ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0};
    for (int i = 0; i < 3; i++) if (!strcmp(name, ggml_type_name(types[i]))) return types[i];
    fail("KV is f32, f16 or q8_0");
    return GGML_TYPE_COUNT;
}

int main(int argc, char ** argv) {
    double begun = seconds();
    const char * verb = argc > 3 ? argv[3] : "";
    int is_start = !strcmp(verb, "start"), is_text = !strcmp(verb, "text");
    int is_ids = !strcmp(verb, "ids");
    if (!is_start && !is_text && !is_ids && strcmp(verb, "prompts"))
        fail("MODEL, THREADS, and start, text, prompts or ids are needed");
    if (is_start ? argc != 7 : is_text ? argc != 6 : argc != 6 && argc != 7)
        fail("start wants TOKENS CONTEXT KV, text FILE LENGTH, prompts and ids FILE TOKENS "
             "[LOGITS]");
    int threads = atoi(argv[2]), number = atoi(argv[5]), tokens = is_start ? atoi(argv[4]) : 0;
    if (threads < 1) fail("THREADS is 1 or more");
    if (number < 2 || (number > CONTEXT && !is_start)) fail("LENGTH and TOKENS are from 2 to 4096");
    if (is_start && (tokens < 1 || tokens > 512 || tokens > number))
        fail("TOKENS is from 1 to 512, and no more than CONTEXT");
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("llama.cpp does not load the model");
    struct llama_context_params parameters = llama_context_default_params();
    parameters.n_threads = parameters.n_threads_batch = threads;
    parameters.n_ctx = is_start ? number : CONTEXT;
    /* Sliding layers keep their window and no more, as llama-bench has it. */
    parameters.swa_full = false;
    if (is_start) {
        parameters.type_k = parameters.type_v = kv_type(argv[6]);
    } else {
        parameters.n_batch = CONTEXT;
        parameters.type_k = parameters.type_v = GGML_TYPE_F32;
        parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    struct llama_context * context = llama_init_from_model(model, parameters);
    if (!context) fail("llama.cpp makes no context");
    if (is_start) {
        measure_start(context, tokens, begun);
    } else if (is_text) {
        perplexity(context, read_file(argv[4]), number);
    } else {
        FILE * logits = argc == 7 ? fopen(argv[6], "wb") : NULL;
        if (argc == 7 && !logits) fail("LOGITS cannot be written");
        continuations(context, read_file(argv[4]), is_ids, number, logits);
        if (logits && fclose(logits)) fail("LOGITS cannot be written");
    }
    return 0;
}
