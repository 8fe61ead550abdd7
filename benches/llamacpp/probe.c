// What llama-bench does not tell of llama.cpp: logits of given tokens, and time and memory of a
// cold start.
//
//   probe logits MODEL < IDS > LOGITS    IDS: token ids in text; LOGITS: one f32 row a token
//   probe start MODEL THREADS CONTEXT PROMPT_TOKENS    prints a line of JSON
#include "llama.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static long anonymous_bytes(void) {
    char line[256];
    long kibibytes = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "RssAnon: %ld", &kibibytes);
    if (status) fclose(status);
    return kibibytes < 0 ? -1 : kibibytes * 1024;
}

static int fail(const char *what) {
    fprintf(stderr, "probe: %s\n", what);
    return 1;
}

static struct llama_batch batch_of(const llama_token *ids, int count, int all_logits) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all_logits || i + 1 == count;
    }
    return batch;
}

int main(int argc, char **argv) {
    int logits = argc == 3 && !strcmp(argv[1], "logits");
    if (!logits && !(argc == 6 && !strcmp(argv[1], "start"))) return fail("see the source for usage");
    double start = seconds();
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[2], llama_model_default_params());
    if (!model) return fail("the model cannot be loaded");
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    static llama_token ids[65536];
    int count = 0;
    struct llama_context_params params = llama_context_default_params();
    if (logits) {
        while (count < 65536 && scanf("%d", &ids[count]) == 1) count++;
        if (count == 0) return fail("no ids");
        params.n_ctx = params.n_batch = (uint32_t)count;
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.n_threads = params.n_threads_batch = 1;
    } else {
        params.n_threads = params.n_threads_batch = atoi(argv[3]);
        params.n_ctx = (uint32_t)atoi(argv[4]);
        count = atoi(argv[5]);
        if (count < 1 || count > 65536) return fail("PROMPT_TOKENS is 1 to 65536");
        for (int i = 0; i < count; i++) ids[i] = (i * 7919 + 11) % vocabulary;
    }
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) return fail("no context can be made");
    double ready = seconds();
    if (llama_decode(context, batch_of(ids, count, logits))) return fail("decoding failed");
    if (logits) {
        for (int i = 0; i < count; i++) {
            const float *row = llama_get_logits_ith(context, i);
            if (fwrite(row, sizeof(float), (size_t)vocabulary, stdout) != (size_t)vocabulary)
                return fail("the logits cannot be written");
        }
        return 0;
    }
    double first = seconds();
    printf("{\"ready_seconds\": %.6f, \"first_logits_seconds\": %.6f, \"anonymous_bytes\": %ld}\n",
           ready - start, first - start, anonymous_bytes());
    return 0;
}
