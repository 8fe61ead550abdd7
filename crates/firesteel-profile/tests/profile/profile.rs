//! Published compositions, hostile tables and exact counts of bytes.

use firesteel_checkpoint::{LayerKind, ModelConfig, preset};
use firesteel_profile::{
    Basis, BreakEven, Composition, GRAPH_LIMIT, KvElement, LayerShape, MemoryRequest, ModelBytes,
    Origin, PartKind, ProfileError, Prompt, Selection, Table, WeightCoding, WeightCount, compose,
    compose_prompt, memory,
};
use firesteel_step::{CacheLayoutChoice, Logits, StepOptions, StepSpec};
use firesteel_tensor::DType;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

const GALAXY: &str = include_str!("../../tables/galaxy-s25.json");

fn spark() -> ModelConfig {
    preset("spark-x2.5-1.7b").unwrap()
}

fn selection(precision: &str, layout: CacheLayoutChoice) -> Selection {
    Selection { runtime: "qnn-npu".into(), precision: precision.into(), dialect: None, layout }
}

fn galaxy(precision: &str, layout: CacheLayoutChoice, contexts: &[usize]) -> Composition {
    let table = Table::galaxy_s25().unwrap();
    compose(&spark(), &table, &selection(precision, layout), contexts).unwrap()
}

fn table(value: &Value) -> Result<Table, ProfileError> {
    Table::from_json(Path::new("t.json"), value.to_string().as_bytes())
}

fn digits(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
}

/// The layers, the layers of the full model and their ratio, as they were published.
#[test]
fn published_compositions_to_the_printed_digit() {
    use CacheLayoutChoice::Roll;
    let cases = [
        // 21 · 0.917 + 7 · 1.127 = 27.146, published as 27.1 and (from rounded parts) as 27.2.
        ("w4a16", 1024, ["27.1", "31.6", "1.16"], true),
        ("w4a16", 4096, ["30.9", "46.5", "1.51"], true),
        ("w8a16", 1024, ["27.1", "31.6", "1.17"], true),
        ("fp16", 1024, ["46.4", "43.7", "0.94"], false),
    ];
    for (precision, context, published, timing_only) in cases {
        let composition = galaxy(precision, Roll, &[context]);
        let step = &composition.steps[0];
        let found =
            [digits(step.layers_ms, 1), digits(step.all_full_ms, 1), digits(step.speedup, 2)];
        assert_eq!(found, published, "{precision} at {context}");
        assert_eq!(composition.timing_only, timing_only, "{precision} at {context}");
        assert_eq!(step.basis, Some(Basis::Measured), "{precision} at {context}");
        assert_eq!(composition.sources[0].origin, Origin::Published);
    }
    assert_eq!(digits(galaxy("w4a16", Roll, &[1024]).steps[0].layers_ms, 3), "27.146");
}

#[test]
fn the_calibrated_ring_build_has_the_published_rate() {
    let composition = galaxy("w8a16", CacheLayoutChoice::Auto, &[1024, 2048]);
    let step = &composition.steps[0];
    let (sliding, full) = (step.sliding.unwrap(), step.full.unwrap());
    assert_eq!((sliding.count, full.count), (21, 7));
    let parts = [
        digits(Some(21.0 * sliding.ms), 2),
        digits(Some(7.0 * full.ms), 2),
        digits(step.head.map(|head| head.ms), 2),
        digits(step.step_ms, 2),
        digits(step.tokens_per_second, 1),
    ];
    assert_eq!(parts, ["16.86", "6.59", "3.91", "27.36", "36.5"]);
    assert!(!composition.timing_only);
    assert_eq!(composition.break_even, Some(BreakEven::AtMost(1024)));
    // Another context has one point of the calibrated build, and the others are not mixed in.
    let step = &composition.steps[1];
    assert_eq!((step.full, step.layers_ms, step.step_ms, step.basis), (None, None, None, None));
    assert_eq!(step.missing, ["full_attention was measured at 1024 only"]);
}

#[test]
fn contexts_between_and_outside_are_marked() {
    let composition = galaxy("fp16", CacheLayoutChoice::Roll, &[256, 2560, 8192]);
    let full: Vec<_> = composition.steps.iter().map(|step| step.full.unwrap()).collect();
    // Halfway between 1.559 and 2.964; beyond, on the line through both.
    let slope = (2.964 - 1.559) / 3072.0;
    let expected = [
        (1.559 - 768.0 * slope, Basis::Extrapolated),
        ((1.559 + 2.964) / 2.0, Basis::Interpolated),
        (2.964 + 4096.0 * slope, Basis::Extrapolated),
    ];
    for (found, (ms, basis)) in full.iter().zip(expected) {
        assert!((found.ms - ms).abs() < 1e-9, "{found:?} {ms}");
        assert_eq!(found.basis, basis);
    }
    let step = &composition.steps[0];
    // A window of 512 is not full at 256.
    assert_eq!(step.sliding.unwrap().basis, Basis::Extrapolated);
    assert_eq!(composition.steps[1].sliding.unwrap().basis, Basis::Measured);
    assert_eq!(composition.steps[1].basis, Some(Basis::Interpolated));
    // fp16 has no head: no rate, and the reason.
    assert_eq!((step.head, step.step_ms, step.tokens_per_second), (None, None, None));
    assert_eq!(step.missing, ["head was not measured"]);
    // 1024 + 3072 · (1.689 − 1.559) / (2.964 − 1.559) = 1308.2
    assert_eq!(composition.break_even, Some(BreakEven::Interpolated(1309)));
}

#[test]
fn a_block_confirms_that_composing_is_sound() {
    let table = Table::galaxy_s25().unwrap();
    let ms = |kind: PartKind| {
        let row = table.measurements.iter().find(|row| {
            let ring = row.layout == Some(firesteel_step::CacheLayout::Ring);
            let fp16 = row.precision == "fp16" && row.runtime == "qnn-npu";
            row.kind == kind && ring && fp16
        });
        row.unwrap().ms
    };
    let sum = 3.0 * ms(PartKind::Sliding) + ms(PartKind::Full);
    assert_eq!(digits(Some(sum), 3), "6.016");
    assert_eq!(digits(Some(ms(PartKind::Block)), 3), "6.103");
}

/// Kind, layout, context, ms, timing only.
type Row<'a> = (&'a str, Option<&'a str>, Option<usize>, f64, bool);

/// A table of the given rows.
fn rows(rows: &[Row<'_>]) -> Value {
    let mut value: Value = serde_json::from_str(GALAXY).unwrap();
    value["measurements"] = rows
        .iter()
        .map(|(kind, layout, context, ms, timing_only)| {
            json!({
                "runtime": "qnn-npu", "precision": "x", "kind": kind, "layout": layout,
                "context": context, "tokens": 1, "ms": ms, "statistic": "median",
                "timing_only": timing_only, "source": "s25",
            })
        })
        .collect();
    value
}

#[test]
fn break_even_and_builds() {
    const SLIDING: &str = "sliding_attention";
    const FULL: &str = "full_attention";
    let (ring, roll) = (Some("ring"), Some("roll"));
    let full = |context, ms| (FULL, roll, Some(context), ms, false);
    let slow = (SLIDING, ring, None, 3.0, false);
    let above = rows(&[slow, full(4096, 2.0), full(1024, 1.0)]);
    let between = rows(&[slow, full(8192, 9.0), full(4096, 5.0), full(1024, 1.0)]);
    let single = rows(&[slow, full(1024, 3.5)]);
    // Only the builds that compute nothing have both kinds of layer.
    let timing = rows(&[
        (SLIDING, ring, None, 0.5, true),
        (FULL, roll, Some(1024), 1.5, true),
        full(1024, 9.0),
    ]);
    // Neither has both, so one time is missing and none is borrowed.
    let torn = rows(&[(SLIDING, ring, None, 0.5, true), full(1024, 9.0)]);
    let steep = rows(&[slow, full(1024, 1.0), full(2048, 9.0)]);
    let cases = [
        ("above", above, Some(BreakEven::Above(4096)), "70.00", false),
        ("between", between, Some(BreakEven::Interpolated(2560)), "70.00", false),
        ("single", single, Some(BreakEven::AtMost(1024)), "87.50", false),
        ("timing", timing, Some(BreakEven::AtMost(1024)), "21.00", true),
        ("torn", torn, None, "-", false),
        ("steep", steep, Some(BreakEven::Interpolated(1280)), "70.00", false),
    ];
    let wanted = selection("x", CacheLayoutChoice::Auto);
    for (name, value, break_even, layers, timing_only) in cases {
        let composition = compose(&spark(), &table(&value).unwrap(), &wanted, &[1024]).unwrap();
        let step = &composition.steps[0];
        assert_eq!(composition.break_even, break_even, "{name}");
        assert_eq!(digits(step.layers_ms, 2), layers, "{name}");
        assert_eq!(composition.timing_only, timing_only, "{name}");
    }
    // A line that falls below 0 gives no time.
    let steep = rows(&[slow, full(1024, 1.0), full(2048, 9.0)]);
    let step = compose(&spark(), &table(&steep).unwrap(), &wanted, &[512]).unwrap().steps.remove(0);
    assert_eq!(step.full, None);
    assert!(step.missing[0].contains("through 1024 and 2048 has no time at 512"), "{step:?}");
    // Slices have their own numbers of layers.
    let slice = spark().with_layers(3).unwrap();
    let composition = compose(&slice, &table(&steep).unwrap(), &wanted, &[1024]).unwrap();
    let step = &composition.steps[0];
    assert_eq!(
        (digits(step.layers_ms, 1), digits(step.all_full_ms, 1)),
        ("9.0".into(), "3.0".into())
    );
    assert_eq!((step.full, composition.break_even), (None, None));
}

/// A prompt of 1000 in chunks of 64: 15 whole ones and 40 tokens.
#[test]
fn a_prompt_is_its_chunks() {
    const SLIDING: &str = "sliding_attention";
    const FULL: &str = "full_attention";
    let (ring, roll) = (Some("ring"), Some("roll"));
    let mut value = rows(&[
        (SLIDING, ring, None, 2.0, false),
        (FULL, roll, Some(1024), 3.0, false),
        (FULL, roll, Some(4096), 6.0, false),
        ("head", None, None, 4.0, false),
        (SLIDING, ring, None, 0.5, false),
        (FULL, roll, Some(1024), 1.0, false),
    ]);
    for row in &mut value["measurements"].as_array_mut().unwrap()[..3] {
        row["tokens"] = json!(64);
    }
    let times = table(&value).unwrap();
    let wanted = selection("x", CacheLayoutChoice::Auto);
    let of = |tokens, chunk, contexts: &[usize]| {
        compose_prompt(&spark(), &times, &wanted, &Prompt { tokens, chunk, contexts }).unwrap()
    };
    let prompts = of(1000, 64, &[1024, 2048, 512]);
    let first = &prompts[0];
    assert_eq!((first.chunks, first.last_chunk_tokens), (16, 40));
    // 21 · 2 + 7 · 3 a chunk; 15 chunks and 40 steps of 21 · 0.5 + 7 · 1.
    assert_eq!((first.chunk_ms, first.prompt_ms), (Some(63.0), Some(1008.0)));
    assert_eq!(first.time_to_first_token_ms, Some(1012.0));
    assert_eq!(first.rest_in_steps_ms, Some(15.0 * 63.0 + 40.0 * 17.5 + 4.0));
    assert_eq!(digits(first.tokens_per_second, 2), "992.06");
    assert_eq!((first.basis, first.missing.len()), (Some(Basis::Measured), 0));
    // A third of the way from 3 to 6; no single step was measured beside 1024.
    assert_eq!(prompts[1].prompt_ms, Some(16.0 * (42.0 + 7.0 * 4.0)));
    assert_eq!((prompts[1].basis, prompts[1].rest_in_steps_ms), (Some(Basis::Interpolated), None));
    assert_eq!((prompts[2].prompt_ms, prompts[2].time_to_first_token_ms), (None, None));
    assert_eq!(prompts[2].missing, ["a prompt of 1000 does not fit in a context of 512"]);
    // Whole chunks leave no rest, and a short prompt is one chunk.
    let whole = &of(128, 64, &[1024])[0];
    assert_eq!((whole.chunks, whole.last_chunk_tokens), (2, 64));
    assert_eq!((whole.prompt_ms, whole.rest_in_steps_ms), (Some(126.0), None));
    let short = &of(3, 64, &[1024])[0];
    assert_eq!((short.chunks, short.prompt_ms), (1, Some(63.0)));
    assert_eq!(short.rest_in_steps_ms, Some(3.0 * 17.5 + 4.0));
    // Chunks of one are steps; of another length there is nothing.
    assert_eq!(of(10, 1, &[1024])[0].prompt_ms, Some(175.0));
    let missing = &of(10, 32, &[1024])[0];
    assert_eq!((missing.prompt_ms, missing.basis), (None, None));
    assert_eq!(missing.missing[0], "sliding_attention was not measured with 32 tokens");
    // The step is composed of single tokens as before.
    let step = &compose(&spark(), &times, &wanted, &[1024]).unwrap().steps[0];
    assert_eq!(step.step_ms, Some(17.5 + 4.0));
}

#[test]
fn what_cannot_be_composed_is_named() {
    let galaxy = Table::galaxy_s25().unwrap();
    let auto = CacheLayoutChoice::Auto;
    let mut dialects = rows(&[
        ("head", None, None, 1.0, false),
        ("full_attention", Some("roll"), Some(1), 1.0, false),
    ]);
    dialects["measurements"][0]["dialect"] = json!("qnn");
    let dialects = table(&dialects).unwrap();
    let other = |change: fn(&mut Selection)| {
        let mut selection = selection("x", auto);
        change(&mut selection);
        selection
    };
    let small = preset("spark-x2.5-4b").unwrap();
    let cases = [
        (&galaxy, spark(), selection("int3", auto), 1024, "precision is int3; accepted: fp16"),
        (
            &galaxy,
            spark(),
            other(|s| s.runtime = "gpu".into()),
            1024,
            "runtime is gpu; accepted: cpu",
        ),
        (&galaxy, spark(), selection("fp16", auto), 0, "context is 0; accepted: 1 to 16777216"),
        (&galaxy, spark(), selection("fp16", auto), 1 << 25, "context is 33554432"),
        (
            &galaxy,
            small,
            selection("fp16", auto),
            1024,
            "hidden_size 2048, and this model's have 2560",
        ),
        (
            &dialects,
            spark(),
            selection("x", auto),
            1024,
            "dialect is not chosen; accepted: none named, qnn",
        ),
        (
            &dialects,
            spark(),
            other(|s| s.dialect = Some("ort".into())),
            1024,
            "dialect is ort; accepted: none named, qnn",
        ),
    ];
    let mut failures = Vec::new();
    for (table, config, selection, context, reason) in cases {
        match compose(&config, table, &selection, &[context]) {
            Err(error) if error.to_string().contains(reason) => {}
            other => failures.push(format!("{reason}: {other:?}")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    let qnn = other(|s| s.dialect = Some("qnn".into()));
    let step = compose(&spark(), &dialects, &qnn, &[1]).unwrap().steps.remove(0);
    assert_eq!((step.head.map(|head| head.ms), step.full), (Some(1.0), None));
}

#[test]
fn the_published_table_is_complete_and_marked() {
    let table = Table::galaxy_s25().unwrap();
    assert_eq!(table.model, LayerShape::of(&spark()));
    assert_eq!(table.measurements.len(), 27);
    for row in &table.measurements {
        assert!(row.note.is_some(), "{row:?}");
        // What is not accurate, or of which nobody knows whether it is, has a time and no more.
        let integer = row.precision != "fp16";
        let accurate = row.snr_db.is_some_and(|db| db > 20.0);
        assert_eq!(row.timing_only, integer && !accurate, "{row:?}");
    }
    let again: Table = table_of(&serde_json::to_string(&table).unwrap());
    assert_eq!(again, table);
}

fn table_of(text: &str) -> Table {
    Table::from_json(Path::new("t.json"), text.as_bytes()).unwrap()
}

type Change = fn(&mut Value);

#[test]
fn hostile_tables_are_refused_by_name() {
    let cases: &[(Change, &str)] = &[
        (|t| t["format"] = json!("x".repeat(5000)), "the table: format is \"xxx"),
        (|t| t["version"] = json!(2), "version is 2; accepted: 1"),
        (|t| t["version"] = json!(-1), "no table of layer times"),
        (|t| t["device"] = json!(" "), "device is \" \"; accepted: 1 to 64 bytes"),
        (|t| t["soc"] = json!("a\u{1b}[31m"), "soc is \"a\\u{1b}[31m\""),
        (|t| t["soc"] = json!("a\u{202e}b"), "soc is"),
        (|t| t["extra"] = json!(1), "unknown field `extra`"),
        (|t| t["model"]["hidden_size"] = json!(0), "model: hidden_size is 0"),
        (|t| t["model"]["hidden_size"] = json!(1u64 << 40), "hidden_size is 1099511627776"),
        (|t| t["model"]["hidden_size"] = json!(1e300), "no table of layer times"),
        (
            |t| t["model"]["sliding_window"] = Value::Null,
            "measurements[0]: kind is sliding_attention",
        ),
        (|t| t["sources"] = json!([]), "sources is a list of 0"),
        (
            |t| t["sources"] = vec![t["sources"][0].clone(); 2].into(),
            "sources[1]: id is \"s25\"; accepted: each id once",
        ),
        (|t| t["sources"][0]["origin"] = json!("estimated"), "unknown variant `estimated`"),
        (|t| t["measurements"] = json!([]), "measurements is a list of 0"),
        (
            |t| t["measurements"] = vec![t["measurements"][0].clone(); 10_001].into(),
            "a list of 10001",
        ),
        (|t| t["measurements"][1] = t["measurements"][0].clone(), "measurements[1]: ms is 1.689"),
        (|t| t["measurements"][0]["ms"] = json!(0.0), "measurements[0]: ms is 0;"),
        (|t| t["measurements"][0]["ms"] = json!(-1.0), "ms is -1;"),
        (|t| t["measurements"][0]["ms"] = json!(1e10), "ms is 10000000000;"),
        (|t| t["measurements"][0]["ms"] = Value::Null, "no table of layer times"),
        (|t| t["measurements"][0]["low"] = json!(9.0), "accepted: a time between low and high"),
        (|t| t["measurements"][0]["high"] = json!(0.1), "accepted: a time between low and high"),
        (|t| t["measurements"][0]["n"] = json!(0), "n is 0"),
        (|t| t["measurements"][0]["tokens"] = json!(0), "tokens is 0"),
        (
            |t| t["measurements"][0]["context"] = json!(1),
            "context is given; accepted: null for sliding",
        ),
        (|t| t["measurements"][9]["context"] = json!(1 << 25), "context is 33554432"),
        (
            |t| t["measurements"][9]["context"] = Value::Null,
            "context is null; accepted: a value for full",
        ),
        (|t| t["measurements"][0]["layout"] = Value::Null, "layout is null; accepted: a value"),
        (
            |t| t["measurements"][17]["layout"] = json!("ring"),
            "layout is given; accepted: null for head",
        ),
        (
            |t| t["measurements"][20]["variant"] = Value::Null,
            "variant is null; accepted: a value for block",
        ),
        (
            |t| t["measurements"][0]["source"] = json!("who"),
            "source is \"who\"; accepted: the id of a source",
        ),
        (|t| t["measurements"][0]["note"] = json!("x".repeat(1001)), "note is"),
        (|t| t["measurements"][0]["kind"] = json!("mlp"), "unknown variant `mlp`"),
    ];
    let mut failures = Vec::new();
    for (change, reason) in cases {
        let mut value: Value = serde_json::from_str(GALAXY).unwrap();
        change(&mut value);
        match table(&value) {
            Err(error) if error.to_string().contains(reason) => {}
            other => failures.push(format!("{reason}: {:?}", other.map(|_| "accepted"))),
        }
    }
    let texts: &[(String, &str)] = &[
        (String::new(), "the file is empty"),
        ("[".repeat(100_000), "no table of layer times"),
        ("<!doctype html>".into(), "it is a web page"),
        (
            GALAXY.replacen("\"version\": 1,", "\"version\": 1, \"version\": 1,", 1),
            "duplicate field",
        ),
        (GALAXY.replacen("1.689", "1e999", 1), "number out of range"),
        (GALAXY.replacen("1.689", "NaN", 1), "no table of layer times"),
        (format!("{GALAXY}{}", " ".repeat(4 << 20)), "accepted: at most 4194304"),
        (format!("{GALAXY}{{}}"), "trailing characters"),
    ];
    for (text, reason) in texts {
        match Table::from_json(Path::new("t.json"), text.as_bytes()) {
            Err(error) if error.to_string().contains(reason) => {}
            other => failures.push(format!("{reason}: {:?}", other.map(|_| "accepted"))),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_truncated_table_is_refused() {
    let end = GALAXY.trim_end().len();
    for length in (0..end).step_by(97).chain([end - 1]) {
        let text = &GALAXY.as_bytes()[..length];
        assert!(Table::from_json(Path::new("t.json"), text).is_err(), "{length} bytes");
    }
}

proptest! {
    /// A changed table is refused or composes; nothing panics and no time is invented.
    #[test]
    fn changed_bytes_do_no_harm(place in 0..GALAXY.len(), byte: u8, context in 1usize..1 << 24) {
        let mut text = GALAXY.as_bytes().to_vec();
        text[place] = byte;
        if let Ok(table) = Table::from_json(Path::new("t.json"), &text) {
            let chosen = selection("fp16", CacheLayoutChoice::Roll);
            if let Ok(composition) = compose(&spark(), &table, &chosen, &[context]) {
                let step = &composition.steps[0];
                for ms in [step.layers_ms, step.all_full_ms, step.step_ms].into_iter().flatten() {
                    prop_assert!(ms.is_finite() && ms > 0.0);
                }
            }
        }
    }
}

fn step_bytes(
    config: &ModelConfig,
    layers: std::ops::Range<usize>,
    request: &MemoryRequest<'_>,
    context: usize,
) -> u64 {
    let options = StepOptions {
        tokens: 1,
        context,
        layers,
        cache_layout: request.layout,
        logits: Logits::Hidden,
        dtype: if request.kv == KvElement::F32 { DType::F32 } else { DType::F16 },
    };
    StepSpec::new(config, &options).unwrap().cache_bytes() as u64
}

/// Caches are those of the step, graphs cover the model once, in order and within the limit, and
/// no graph could take the next layer in.
#[test]
fn memory_is_that_of_the_step() {
    use CacheLayoutChoice::{Auto, Ring, Roll};
    let contexts = [1, 100, 511, 512, 4096, 32_768, 131_072, 1_048_576];
    for (name, stored_head) in [("spark-x2.5-1.7b", false), ("spark-x2.5-4b", true)] {
        let config = preset(name).unwrap();
        let weights: Vec<_> =
            [WeightCoding::F16, WeightCoding::Int8PerRow, WeightCoding::Int4PerRow]
                .map(|coding| {
                    let bytes = ModelBytes::coded(&config, stored_head, coding).unwrap();
                    let whole = WeightCount::model(&config, stored_head).unwrap().bytes(coding);
                    assert_eq!(bytes.total(), whole, "{name} {}", coding.name());
                    (coding.name().to_owned(), bytes)
                })
                .into();
        for (layout, kv) in [(Auto, KvElement::F16), (Ring, KvElement::F32), (Roll, KvElement::I16)]
        {
            let request = MemoryRequest {
                config: &config,
                weights: &weights,
                contexts: &contexts,
                layout,
                kv,
                ram: Some(8 << 30),
            };
            for at in memory(&request).unwrap().contexts {
                let about = format!("{name} {layout:?} {kv} {}", at.context);
                let whole = step_bytes(&config, 0..config.num_layers(), &request, at.context);
                assert_eq!(at.kv_bytes, whole, "{about}");
                for (plan, (_, bytes)) in at.plans.iter().zip(&weights) {
                    assert_eq!(plan.total_bytes, plan.weight_bytes + at.kv_bytes, "{about}");
                    assert_eq!(
                        plan.weights_and_kv_fit,
                        Some(plan.total_bytes <= 8 << 30),
                        "{about}"
                    );
                    let Some(parts) = &plan.graphs else {
                        // Only a full layer's cache of a million tokens is too large.
                        assert!(at.context == 1_048_576 && plan.unsplittable.is_some(), "{about}");
                        continue;
                    };
                    let mut next = 0;
                    for (index, part) in parts.iter().enumerate() {
                        assert_eq!(part.first_layer, next, "{about}");
                        next = part.end_layer;
                        let layers = part.first_layer..part.end_layer;
                        if !layers.is_empty() {
                            let kv = step_bytes(&config, layers, &request, at.context);
                            assert_eq!(part.kv_bytes, kv, "{about}");
                        }
                        let size = part.weight_bytes + part.kv_bytes;
                        assert!(size <= GRAPH_LIMIT, "{about}");
                        assert_eq!(part.head, index + 1 == parts.len(), "{about}");
                        if !part.head {
                            let unit = match bytes.layers.get(next) {
                                None => bytes.head,
                                Some(layer) => {
                                    let kv =
                                        step_bytes(&config, next..next + 1, &request, at.context);
                                    layer + kv
                                }
                            };
                            assert!(size + unit > GRAPH_LIMIT, "{about}");
                        }
                    }
                    assert_eq!(next, config.num_layers(), "{about}");
                    let sum: u64 = parts.iter().map(|p| p.weight_bytes + p.kv_bytes).sum();
                    assert_eq!(sum, plan.total_bytes - bytes.embedding, "{about}");
                }
            }
        }
    }
}

#[test]
fn caches_have_the_published_bytes_in_every_format() {
    let published = [
        ("spark-x2.5-1.7b", 1_048_576, 14_357u64 << 20, 57_344u64 << 20),
        ("spark-x2.5-4b", 1_048_576, 36_918 << 20, 147_456 << 20),
        ("spark-x2.5-1.7b", 4096, 80_740_352, 224 << 20),
    ];
    for (name, context, hybrid, uniform) in published {
        let config = preset(name).unwrap();
        // Halves of a 16-bit entry.
        for (kv, numerator, denominator) in [
            (KvElement::F32, 4, 2),
            (KvElement::F16, 2, 2),
            (KvElement::I16, 2, 2),
            (KvElement::I8, 1, 2),
            (KvElement::Q8, 34, 64),
        ] {
            let request = MemoryRequest {
                config: &config,
                weights: &[],
                contexts: &[context],
                layout: CacheLayoutChoice::Roll,
                kv,
                ram: None,
            };
            let memory = memory(&request).unwrap();
            let at = &memory.contexts[0];
            assert_eq!(at.kv_bytes, hybrid / denominator * numerator, "{name} {kv}");
            assert_eq!(at.kv_all_full_bytes, uniform / denominator * numerator, "{name} {kv}");
            // A rolled full layer joins its keys with the new one before it drops the oldest.
            let joined = (config.num_key_value_heads * context * config.head_dim) as u64;
            let width = if kv == KvElement::F32 { 4 } else { 2 };
            match at.activation_bytes {
                None => assert_eq!(kv, KvElement::Q8),
                Some(bytes) => {
                    let entry = if kv == KvElement::I8 { 1 } else { width };
                    assert!(bytes > entry * joined, "{name} {kv}: {bytes}");
                    assert!(bytes < 8 * width * (joined + 1_000_000), "{name} {kv}: {bytes}");
                }
            }
        }
    }
}

#[test]
fn a_split_of_the_real_model() {
    let config = spark();
    let bytes = ModelBytes::coded(&config, false, WeightCoding::F16).unwrap();
    // 12 · 256 · 2048 + 2048² + 3 · 2048 · 6656 + 8 · 2048 + 2 · 2048 elements.
    assert_eq!(bytes.layers[0], 2 * (6_291_456 + 4_194_304 + 40_894_464 + 16_384 + 4096));
    assert_eq!((bytes.head, bytes.embedding), (2 * (131_072 * 2048 + 2048), 0));
    let weights = [("f16".to_owned(), bytes)];
    let mut request = MemoryRequest {
        config: &config,
        weights: &weights,
        contexts: &[4096],
        layout: CacheLayoutChoice::Auto,
        kv: KvElement::F16,
        ram: None,
    };
    let plan = memory(&request).unwrap().contexts.remove(0).plans.remove(0);
    let ranges: Vec<_> =
        plan.graphs.unwrap().iter().map(|p| (p.first_layer, p.end_layer, p.head)).collect();
    assert_eq!(ranges, [(0, 20, false), (20, 28, true)]);
    assert_eq!(plan.weights_and_kv_fit, None);

    // The cache of one full layer alone is 2 GiB.
    request.contexts = &[1_048_576];
    let plan = memory(&request).unwrap().contexts.remove(0).plans.remove(0);
    assert_eq!(plan.graphs, None);
    assert!(plan.unsplittable.unwrap().starts_with("layer 3 alone has 102801408 bytes"));
}

#[test]
fn counts_that_cannot_be_had_are_refused() {
    let mut odd = spark();
    odd.head_dim = 48;
    let mut huge = spark();
    huge.hidden_size = 1 << 31;
    huge.vocab_size = 1 << 31;
    huge.intermediate_size = 1 << 31;
    huge.layer_types = vec![LayerKind::Full; 512];
    assert_eq!(WeightCount::model(&huge, true), None);
    assert_eq!(ModelBytes::coded(&huge, true, WeightCoding::Int4PerRow), None);
    huge.num_key_value_heads = 1 << 31;
    huge.head_dim = 1 << 31;
    let cases = [
        (&odd, 1024, KvElement::Q8, "q8 with a head_dim of 48"),
        (&odd, 0, KvElement::F16, "context is 0"),
        (&odd, 1 << 25, KvElement::F16, "context is 33554432"),
        (&huge, 1024, KvElement::F16, "the bytes of the caches do not fit"),
    ];
    for (config, context, kv, reason) in cases {
        let request = MemoryRequest {
            config,
            weights: &[],
            contexts: &[context],
            layout: CacheLayoutChoice::Auto,
            kv,
            ram: None,
        };
        let error = memory(&request).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    assert!("f8".parse::<KvElement>().unwrap_err().to_string().contains("f32, f16, i16, i8, q8"));
}
