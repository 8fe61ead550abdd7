/* What llama.cpp does with a GGUF file.
 *
 * peer MODEL THREADS start TOKENS CONTEXT
 * peer MODEL THREADS text FILE LENGTH
 * peer MODEL THREADS prompts FILE TOKENS
 *
 * The first prints time and memory of a cold start with a prompt of TOKENS as a line of JSON. The
 * second prints the number of tokens of a text and its perplexity, cut into sequences of LENGTH
 * from an empty cache, the third the ids of a greedy continuation of each line. */
#include "llama.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONTEXT = 4096, IDS = 1 << 20 };

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

static void measure_start(struct llama_context * context, int count, double begun) {
    const struct llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    double ready = seconds();
    if (count < 1 || count > 512) fail("TOKENS is from 1 to 512");
    for (int i = 0; i < count; i++) ids[i] = (i * 7919 + 11) % llama_vocab_n_tokens(vocab);
    if (llama_decode(context, llama_batch_get_one(ids, count))) fail("llama_decode failed");
    printf("{\"ready_seconds\": %.6f, \"first_logits_seconds\": %.6f, \"anonymous_bytes\": %ld}\n",
           ready - begun, seconds() - begun, anonymous_bytes());
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

static void continuations(struct llama_context * context, char * text, int number) {
    const struct llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    int width = llama_vocab_n_tokens(vocab);
    for (char * line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        int count = tokenize(vocab, line, true);
        if (count + number > CONTEXT) fail("a prompt is too long");
        llama_memory_clear(llama_get_memory(context), true);
        decode(context, ids, count, 0);
        int last = count - 1;
        for (int made = 0; made < number; made++) {
            const float * logits = llama_get_logits_ith(context, last);
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

int main(int argc, char ** argv) {
    double begun = seconds();
    if (argc != 6) fail("five arguments are needed: MODEL THREADS start|text|prompts WHAT NUMBER");
    int number = atoi(argv[5]), is_start = !strcmp(argv[3], "start");
    if (number < 2 || (number > CONTEXT && !is_start)) fail("the last argument is from 2 to 4096");
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("llama.cpp does not load the model");
    struct llama_context_params parameters = llama_context_default_params();
    parameters.n_threads = parameters.n_threads_batch = atoi(argv[2]);
    parameters.n_ctx = is_start ? number : CONTEXT;
    if (!is_start) {
        parameters.n_batch = CONTEXT;
        parameters.type_k = parameters.type_v = GGML_TYPE_F32;
        parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    struct llama_context * context = llama_init_from_model(model, parameters);
    if (!context) fail("llama.cpp makes no context");
    if (is_start) measure_start(context, atoi(argv[4]), begun);
    else if (!strcmp(argv[3], "text")) perplexity(context, read_file(argv[4]), number);
    else if (!strcmp(argv[3], "prompts")) continuations(context, read_file(argv[4]), number);
    else fail("the third argument is start, text or prompts");
    return 0;
}
