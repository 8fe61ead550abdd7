// Time and memory of a cold start of llama.cpp, as a line of JSON.
//
//   probe MODEL THREADS CONTEXT PROMPT_TOKENS
#include "llama.h"
#include <stdio.h>
#include <stdlib.h>
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

int main(int argc, char **argv) {
    if (argc != 5) return fail("see the source for usage");
    double start = seconds();
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return fail("the model cannot be loaded");
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    struct llama_context_params params = llama_context_default_params();
    params.n_threads = params.n_threads_batch = atoi(argv[2]);
    params.n_ctx = (uint32_t)atoi(argv[3]);
    int count = atoi(argv[4]);
    if (count < 1 || count > 512) return fail("PROMPT_TOKENS is 1 to 512");
    llama_token ids[512];
    for (int i = 0; i < count; i++) ids[i] = (i * 7919 + 11) % vocabulary;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) return fail("no context can be made");
    double ready = seconds();
    if (llama_decode(context, llama_batch_get_one(ids, count))) return fail("decoding failed");
    printf("{\"ready_seconds\": %.6f, \"first_logits_seconds\": %.6f, \"anonymous_bytes\": %ld}\n",
           ready - start, seconds() - start, anonymous_bytes());
    return 0;
}
