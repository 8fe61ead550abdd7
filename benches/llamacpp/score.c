/* What llama.cpp makes of a GGUF file: the perplexity of a text, cut into sequences from an empty
 * cache, and greedy continuations of prompts, one a line.
 *
 * score BACKENDS MODEL text FILE SEQUENCE
 * score BACKENDS MODEL prompts FILE TOKENS
 *
 * BACKENDS is the folder of llama.cpp's libraries. The first prints the number of tokens and the
 * perplexity, the second the ids of each continuation. */
#include "ggml-backend.h"
#include "llama.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONTEXT = 4096, IDS = 1 << 20 };

static void fail(const char * what) {
    fprintf(stderr, "score: %s\n", what);
    exit(1);
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
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

static int tokenize(const struct llama_vocab * vocab, const char * text, llama_token * ids, bool special) {
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

int main(int argc, char ** argv) {
    if (argc != 6) fail("five arguments are needed: BACKENDS MODEL text|prompts FILE NUMBER");
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[2], llama_model_default_params());
    if (!model) fail("llama.cpp does not load the model");
    struct llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = CONTEXT;
    parameters.n_batch = CONTEXT;
    parameters.type_k = parameters.type_v = GGML_TYPE_F32;
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context * context = llama_init_from_model(model, parameters);
    if (!context) fail("llama.cpp makes no context");
    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    int width = llama_vocab_n_tokens(vocab), number = atoi(argv[5]);
    static llama_token ids[IDS];
    char * text = read_file(argv[4]);
    if (number < 2 || number > CONTEXT) fail("NUMBER is from 2 to 4096");

    if (!strcmp(argv[3], "text")) {
        int count = tokenize(vocab, text, ids, false), predicted = 0;
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
        return 0;
    }
    for (char * line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        int count = tokenize(vocab, line, ids, true);
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
    return 0;
}
