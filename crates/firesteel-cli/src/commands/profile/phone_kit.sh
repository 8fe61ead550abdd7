#!/usr/bin/env bash
# Runs this kit on the phone that adb sees. README.md says what each verb needs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
parts=(@PARTS@)
models=(@MODELS@)
binaries=(@BINARIES@)
arch='@ARCH@'
remote=${REMOTE:-/data/local/tmp/firesteel-kit}
runs=${RUNS:-100}

usage() {
    cat >&2 <<'TEXT'
usage: run.sh outputs | times | times-cpu
  outputs    runs every step with qnn-net-run and fetches its outputs into outputs/
             QNN_SDK_ROOT: Qualcomm's SDK, of the version that compiled the graphs
  times      onnxruntime_perf_test on the NPU; its traces go to times/
             ORT_DIR: onnxruntime_perf_test, libonnxruntime.so, the QNN provider and QNN's
             libraries, all for aarch64-android
  times-cpu  the same on the CPU, for ONNX files
variables: REMOTE (folder on the phone), RUNS (runs that are timed), ANDROID_SERIAL (adb's)
TEXT
    exit 1
}

need() {
    if [[ -z ${!1:-} ]]; then
        echo "run.sh: set $1; $2" >&2
        exit 1
    fi
}

push_kit() {
    adb shell "rm -rf '$remote' && mkdir -p '$remote'"
    adb push models "$remote/"
    for part in "${parts[@]}"; do
        adb shell "mkdir -p '$remote/$part'"
        adb push "$part/inputs" "$part/input_list.txt" "$remote/$part/"
    done
}

on_phone() {
    adb shell "cd '$remote' && LD_LIBRARY_PATH='$remote' ADSP_LIBRARY_PATH='$remote;/vendor/dsp/cdsp' $1"
}

outputs() {
    need QNN_SDK_ROOT "it has bin/aarch64-android/qnn-net-run"
    if [[ -z ${binaries[0]} ]]; then
        echo "run.sh: the graphs are ONNX files, which qnn-net-run does not read; see README.md" >&2
        exit 1
    fi
    push_kit
    adb push "$QNN_SDK_ROOT/bin/aarch64-android/qnn-net-run" \
        "$QNN_SDK_ROOT/lib/aarch64-android/libQnnHtp.so" \
        "$QNN_SDK_ROOT/lib/aarch64-android/libQnnHtpV${arch}Stub.so" \
        "$QNN_SDK_ROOT/lib/hexagon-v${arch}/unsigned/libQnnHtpV${arch}Skel.so" "$remote/"
    adb shell "chmod +x '$remote/qnn-net-run'"
    rm -rf outputs
    mkdir outputs
    for i in "${!parts[@]}"; do
        part=${parts[$i]}
        on_phone "./qnn-net-run --backend libQnnHtp.so --retrieve_context 'models/${binaries[$i]}' \
            --input_list '$part/input_list.txt' --output_dir 'out/$part' \
            --use_native_input_files --use_native_output_files \
            --perf_profile burst --profiling_level detailed"
        adb pull "$remote/out/$part" "outputs/$part"
    done
    echo "compare: firesteel check outputs . outputs" >&2
}

times() {
    need ORT_DIR "it has onnxruntime_perf_test"
    push_kit
    adb push "$ORT_DIR/." "$remote/"
    adb shell "chmod +x '$remote/onnxruntime_perf_test'"
    rm -rf times
    mkdir times
    for i in "${!parts[@]}"; do
        part=${parts[$i]}
        provider="-e cpu"
        if [[ $1 == npu ]]; then
            provider="--plugin_ep_libs 'QNN|libonnxruntime_providers_qnn.so' --plugin_eps QNN \
                --plugin_ep_options 'backend_path|libQnnHtp.so htp_performance_mode|burst profiling_level|detailed profiling_file_path|$part.csv'"
        fi
        on_phone "./onnxruntime_perf_test $provider -I -m times -r $runs -p '$part-trace' 'models/${models[$i]}'"
        on_phone "mkdir -p traces && mv '$part'-trace* '$part'*.csv traces/ 2>/dev/null || true"
        adb pull "$remote/traces" "times/$part"
        on_phone "rm -rf traces"
    done
    echo "read: firesteel profile import times/PART/traces/FILE --warmup 5" >&2
}

case ${1:-} in
    outputs) outputs ;;
    times) times npu ;;
    times-cpu) times cpu ;;
    *) usage ;;
esac
