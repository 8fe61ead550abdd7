//! The safetensors format, read strictly.
//!
//! The rules are those of the reference implementation: a length of 8 bytes, a JSON header of at
//! most 100 MB, and tensors that cover the rest of the file exactly, without holes and overlap.
//! Four things are stricter. A name may appear once only; the reference lets the last one win. A
//! tensor has no members besides its three. A file has at most [`MAX_TENSORS`] tensors, and one
//! tensor's text has at most [`MAX_ENTRY_BYTES`] bytes, so that a header of empty tensors
//! cannot take many times its own size in memory.

use crate::CheckpointError;
use crate::json::{members, shorten};
use crate::mistaken::mistaken_file;
use firesteel_tensor::SharedBytes;
use safetensors::Dtype;
use serde::Deserialize;
use std::path::Path;

/// Longest header, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors of a file.
pub(crate) const MAX_TENSORS: usize = 8192;
/// Longest text of one tensor's entry.
const MAX_ENTRY_BYTES: usize = 1024;
const PREFIX_BYTES: usize = 8;
/// The likely cause of a file that ends too early.
const UNFINISHED: &str = "; the download may not have finished";

/// One tensor of a file.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Offset of the first byte in the file.
    pub(crate) offset: usize,
    pub(crate) bytes: SharedBytes,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The tensors of the file `bytes`, in the order of their data.
pub(crate) fn read(file: &Path, bytes: &SharedBytes) -> Result<Vec<StoredTensor>, CheckpointError> {
    parse(bytes).map_err(|reason| CheckpointError::SafeTensors { file: file.into(), reason })
}

fn parse(bytes: &SharedBytes) -> Result<Vec<StoredTensor>, String> {
    if let Some(mistake) = mistaken_file(bytes) {
        return Err(mistake.into());
    }
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(format!("the file has {} bytes, fewer than the 8 of a header", bytes.len()));
    };
    let length = u64::from_le_bytes(*prefix);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "the header is said to have {length} bytes; accepted: at most {MAX_HEADER_BYTES}"
        ));
    }
    let Some((header, data)) =
        usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length))
    else {
        return Err(format!(
            "the header is said to have {length} bytes, but only {} follow{UNFINISHED}",
            rest.len()
        ));
    };
    let header = std::str::from_utf8(header).map_err(|e| format!("header: {e}"))?;
    let data_start = bytes.len() - data.len();

    let mut entries = Vec::new();
    for (name, raw) in members(header, MAX_TENSORS + 1).map_err(|e| format!("header: {e}"))? {
        if name == "__metadata__" {
            check_metadata(raw.get())?;
            continue;
        }
        let quoted = shorten(&name);
        if raw.get().len() > MAX_ENTRY_BYTES {
            let length = raw.get().len();
            return Err(format!(
                "tensor {quoted:?}: its entry has {length} bytes; accepted: {MAX_ENTRY_BYTES}"
            ));
        }
        let entry: Entry =
            serde_json::from_str(raw.get()).map_err(|e| format!("tensor {quoted:?}: {e}"))?;
        entries.push((name, entry));
    }
    entries.sort_by_key(|(_, entry)| entry.data_offsets);

    let mut tensors = Vec::new();
    let mut next = 0;
    for (name, Entry { dtype, shape, data_offsets: (start, end) }) in entries {
        let fail = |reason: String| Err(format!("tensor {:?}: {reason}", shorten(&name)));
        if end < start {
            return fail(format!("its data_offsets [{start}, {end}] are reversed"));
        }
        if start != next {
            let what = if start < next { "overlap the tensor before" } else { "leave a hole" };
            return fail(format!("its data_offsets [{start}, {end}] {what}, which ends at {next}"));
        }
        let bits = firesteel_tensor::element_count(&shape)
            .and_then(|count| count.checked_mul(dtype.bitsize()));
        let Some(bits) = bits else {
            return fail(format!("the size of shape {shape:?} of {dtype} overflows"));
        };
        if !bits.is_multiple_of(8) {
            return fail(format!("shape {shape:?} of {dtype} is not a whole number of bytes"));
        }
        if bits / 8 != end - start {
            return fail(format!(
                "shape {shape:?} of {dtype} needs {} bytes, but data_offsets [{start}, {end}] \
                 have {}",
                bits / 8,
                end - start
            ));
        }
        let range = data_start.checked_add(start).zip(data_start.checked_add(end));
        let Some((offset, part)) =
            range.and_then(|(from, to)| Some((from, bytes.slice(from..to)?)))
        else {
            return fail(format!(
                "its data_offsets [{start}, {end}] end outside the {} bytes of data{UNFINISHED}",
                data.len()
            ));
        };
        next = end;
        tensors.push(StoredTensor { name: name.into_owned(), dtype, shape, offset, bytes: part });
    }
    if next != data.len() {
        return Err(format!(
            "the tensors cover {next} bytes of data, but the file has {}",
            data.len()
        ));
    }
    Ok(tensors)
}

/// The metadata are not used, but the format allows only strings in them.
fn check_metadata(text: &str) -> Result<(), String> {
    let entries = members(text, MAX_TENSORS).map_err(|e| format!("__metadata__: {e}"))?;
    match entries.iter().find(|(_, value)| !value.get().starts_with('"')) {
        Some((name, _)) => Err(format!("__metadata__: {:?} is not a string", shorten(name))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::safetensors::SafeTensors;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn file(header: &[u8], data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn of(header: Value, data: usize) -> Vec<u8> {
        file(header.to_string().as_bytes(), data)
    }

    fn tensor(shape: Value, offsets: [u64; 2]) -> Value {
        json!({"dtype": "F32", "shape": shape, "data_offsets": offsets})
    }

    fn with_prefix(prefix: u64, rest: usize) -> Vec<u8> {
        let mut bytes = prefix.to_le_bytes().to_vec();
        bytes.resize(8 + rest, b' ');
        bytes
    }

    fn parse_bytes(bytes: &[u8]) -> Result<Vec<StoredTensor>, String> {
        parse(&SharedBytes::new(Arc::new(bytes.to_vec())))
    }

    /// What the reference implementation says.
    fn reference(bytes: &[u8]) -> bool {
        SafeTensors::read_metadata(bytes).is_ok()
    }

    #[test]
    fn broken_files_are_refused_with_the_rule() {
        let a = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
        let twice = format!(r#"{{"a":{a},"a":{a}}}"#);
        let hole = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
        let escaped = format!(r#"{{"ab":{a},"a\u0062":{a}}}"#);
        let field = r#"{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let metadata_twice = format!(r#"{{"__metadata__":{{"k":"1","k":"2"}},"a":{a}}}"#);
        let sections_twice = format!(r#"{{"__metadata__":{{}},"__metadata__":{{}},"a":{a}}}"#);
        let long_name = format!(r#"{{"{}":{a}}}"#, "x".repeat(2000));
        let long_shape = format!(
            r#"{{"a":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}}}"#,
            "1,".repeat(1000)
        );
        let crowded: serde_json::Map<_, _> =
            (0..=MAX_TENSORS + 1).map(|i| (i.to_string(), tensor(json!([0]), [0, 0]))).collect();
        let cases: &[(&str, Vec<u8>, &str)] = &[
            ("prefix of ones", with_prefix(u64::MAX, 70), "said to have 18446744073709551615"),
            ("prefix 2^63", with_prefix(1 << 63, 70), "accepted: at most 100000000"),
            ("prefix 101 MB", with_prefix(101_000_000, 70), "said to have 101000000 bytes"),
            ("prefix beyond the file", with_prefix(1000, 62), "1000 bytes, but only 62 follow"),
            ("seven bytes", vec![0; 7], "the file has 7 bytes, fewer than the 8 of a header"),
            ("empty file", vec![], "the file is empty; download it again"),
            ("empty header", with_prefix(0, 0), "header: it must be a JSON object"),
            (
                "overlap",
                of(json!({"a": tensor(json!([2]), [0, 8]), "b": tensor(json!([2]), [4, 12])}), 12),
                "tensor \"b\": its data_offsets [4, 12] overlap the tensor before, which ends at 8",
            ),
            (
                "same range twice",
                of(json!({"a": tensor(json!([2]), [0, 8]), "b": tensor(json!([2]), [0, 8])}), 8),
                "[0, 8] overlap the tensor before",
            ),
            (
                "hole",
                of(json!({"a": tensor(json!([2]), [0, 8]), "b": tensor(json!([2]), [16, 24])}), 24),
                "tensor \"b\": its data_offsets [16, 24] leave a hole, which ends at 8",
            ),
            (
                "Git LFS pointer",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n".to_vec(),
                "it is a Git LFS pointer, not the file itself; run git lfs pull",
            ),
            ("web page", b" <!DOCTYPE html><html>Sign in".to_vec(), "it is a web page"),
            ("zip", b"PK\x03\x04archive/data.pkl".to_vec(), "it is a zip or PyTorch file"),
            ("hole at the start", of(json!({"a": tensor(json!([1]), [4, 8])}), 8), "leave a hole"),
            (
                "trailing bytes",
                of(json!({"a": tensor(json!([2]), [0, 8])}), 16),
                "the tensors cover 8 bytes of data, but the file has 16",
            ),
            (
                "short data",
                of(json!({"a": tensor(json!([2]), [0, 8])}), 4),
                "tensor \"a\": its data_offsets [0, 8] end outside the 4 bytes of data",
            ),
            ("data without tensors", of(json!({}), 4), "cover 0 bytes of data"),
            ("duplicate key over a hole", file(hole.as_bytes(), 16), "key \"a\" appears twice"),
            ("duplicate key", file(twice.as_bytes(), 8), "header: key \"a\" appears twice"),
            ("escaped duplicate", file(escaped.as_bytes(), 8), "key \"ab\" appears twice"),
            ("duplicate field", file(field.as_bytes(), 8), "tensor \"a\": duplicate field `dtype`"),
            (
                "duplicate metadata",
                file(metadata_twice.as_bytes(), 8),
                "__metadata__: key \"k\" appears twice",
            ),
            (
                "two sections of metadata",
                file(sections_twice.as_bytes(), 8),
                "key \"__metadata__\" appears twice",
            ),
            (
                "shape that wraps",
                of(json!({"a": tensor(json!([1u64 << 62, 4]), [0, 0])}), 0),
                "tensor \"a\": the size of shape [4611686018427387904, 4] of F32 overflows",
            ),
            (
                "bits that wrap",
                of(json!({"a": tensor(json!([1u64 << 60]), [0, 0])}), 0),
                "the size of shape [1152921504606846976] of F32 overflows",
            ),
            (
                "unknown dtype",
                of(json!({"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}), 4),
                "tensor \"a\": unknown variant `Q7`, expected one of `BOOL`",
            ),
            (
                "negative dim",
                of(json!({"a": tensor(json!([-1]), [0, 4])}), 4),
                "tensor \"a\": invalid value: integer `-1`, expected usize",
            ),
            (
                "fractional dim",
                of(json!({"a": tensor(json!([1.0]), [0, 4])}), 4),
                "invalid type: floating point `1.0`",
            ),
            (
                "size mismatch",
                of(json!({"a": tensor(json!([3]), [0, 8])}), 8),
                "shape [3] of F32 needs 12 bytes, but data_offsets [0, 8] have 8",
            ),
            (
                "reversed offsets",
                of(json!({"a": tensor(json!([2]), [8, 0])}), 8),
                "tensor \"a\": its data_offsets [8, 0] are reversed",
            ),
            (
                "offset 2^63",
                of(json!({"a": tensor(json!([2]), [1 << 63, (1 << 63) + 8])}), 8),
                "leave a hole",
            ),
            (
                "end 2^63",
                of(json!({"a": tensor(json!([2]), [0, 1 << 63])}), 8),
                "needs 8 bytes, but data_offsets [0, 9223372036854775808]",
            ),
            (
                "size beyond the file",
                of(json!({"a": tensor(json!([1u64 << 50]), [0, 1 << 52])}), 8),
                "end outside the 8 bytes of data",
            ),
            (
                "half a byte",
                of(json!({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}), 1),
                "shape [1] of F4 is not a whole number of bytes",
            ),
            (
                "missing field",
                of(json!({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), 4),
                "missing field `shape`",
            ),
            (
                "number in the metadata",
                of(json!({"__metadata__": {"k": 1}}), 0),
                "__metadata__: \"k\" is not a string",
            ),
            (
                "metadata list",
                of(json!({"__metadata__": []}), 0),
                "__metadata__: it must be a JSON",
            ),
            ("list", file(b"[]", 0), "header: it must be a JSON object"),
            ("not UTF-8", file(b"{\"\xff\":1}", 0), "header: invalid utf-8"),
            ("two values", file(b"{}{}", 0), "header: trailing characters"),
            (
                "unknown member",
                of(json!({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4], "s": 1}}), 4),
                "unknown field `s`",
            ),
            ("long name", file(long_name.as_bytes(), 8), "a name of 2000 bytes"),
            ("long shape", file(long_shape.as_bytes(), 4), "bytes; accepted: 1024"),
            ("crowd", of(crowded.into(), 0), "more than 8193 entries"),
        ];
        // What we refuse beyond the reference.
        let stricter = [
            "duplicate key",
            "escaped duplicate",
            "duplicate metadata",
            "unknown member",
            "long name",
            "long shape",
            "crowd",
        ];
        let mut failures = Vec::new();
        for (name, bytes, part) in cases {
            match parse_bytes(bytes) {
                Ok(_) => failures.push(format!("{name}: accepted")),
                Err(e) if !e.contains(part) => {
                    failures.push(format!("{name}: {part:?} not in {e}"))
                }
                Err(_) => {}
            }
            if reference(bytes) != stricter.contains(name) {
                failures.push(format!("{name}: the reference disagrees"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }

    #[test]
    fn unusual_but_valid_files_are_accepted() {
        let spaced = |before: &str, after: &str| {
            let header = json!({"a": tensor(json!([2]), [0, 8])});
            file(format!("{before}{header}{after}").as_bytes(), 8)
        };
        let cases: &[(&str, Vec<u8>, &[usize])] = &[
            ("zero size", of(json!({"a": tensor(json!([0, 4]), [0, 0])}), 0), &[0, 4]),
            ("scalar", of(json!({"a": tensor(json!([]), [0, 4])}), 4), &[]),
            ("spaces before", spaced("   ", ""), &[2]),
            ("spaces after", spaced("", "     "), &[2]),
            (
                "metadata",
                of(json!({"__metadata__": {"k": "\"é\n"}, "a": tensor(json!([1]), [0, 4])}), 4),
                &[1],
            ),
        ];
        for (name, bytes, shape) in cases {
            let tensors = parse_bytes(bytes).unwrap();
            assert_eq!((tensors.len(), &*tensors[0].shape), (1, *shape), "{name}");
            assert!(reference(bytes), "{name}");
        }
        assert!(parse_bytes(&of(json!({}), 0)).unwrap().is_empty());
    }

    #[test]
    fn tensors_come_in_the_order_of_their_data() {
        let header = json!({"b": tensor(json!([1]), [0, 4]), "a": tensor(json!([2]), [4, 12])});
        let tensors = parse_bytes(&of(header, 12)).unwrap();
        let start = tensors[0].offset;
        let read: Vec<_> = tensors.iter().map(|t| (&*t.name, t.offset, t.bytes.len())).collect();
        assert_eq!(read, [("b", start, 4), ("a", start + 4, 8)]);
    }

    fn valid() -> Vec<u8> {
        of(
            json!({
                "__metadata__": {"format": "pt"},
                "a": tensor(json!([2, 3]), [0, 24]),
                "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
                "c": tensor(json!([]), [32, 36]),
            }),
            36,
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn mutated_files_never_panic_and_never_pass_where_the_reference_fails(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = valid();
            for (position, byte) in changes {
                let position = position.index(bytes.len());
                bytes[position] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if parse_bytes(&bytes).is_ok() {
                prop_assert!(reference(&bytes));
            }
        }

        #[test]
        fn mutated_headers_are_judged_like_the_reference(
            position in any::<prop::sample::Index>(),
            byte in prop::sample::select(br#"{}[]",:0123456789 abFBU\-."#.to_vec()),
        ) {
            let mut bytes = valid();
            let header = bytes.len() - 36;
            bytes[8 + position.index(header - 8)] = byte;
            let result = parse_bytes(&bytes);
            let stricter = |e: &String| e.contains("appears twice") || e.contains("unknown field");
            if result.is_ok() != reference(&bytes) {
                prop_assert!(result.as_ref().is_err_and(stricter), "{result:?}");
            }
        }
    }
}
