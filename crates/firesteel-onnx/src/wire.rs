//! A bound on what decoding a file can allocate.
//!
//! An empty message takes two bytes on the wire and hundreds in memory. Before a file is decoded,
//! its fields are counted, so that a hostile file cannot make the decoder use much more memory
//! than the file has bytes.

/// Fields (and numbers in packed lists of integers) that a model may have.
pub(crate) const MAX_FIELDS: usize = 1 << 20;

#[derive(Clone, Copy)]
enum Message {
    Model,
    Graph,
    Node,
    Tensor,
    ValueInfo,
    Type,
    TensorType,
    Shape,
    Leaf,
}

enum Content {
    /// A message whose fields are decoded.
    Message(Message),
    /// A packed list of integers, one byte or more each.
    Integers,
    /// Text, bytes, packed floats, and fields that the decoder skips.
    Opaque,
}

fn content(message: Message, tag: u64) -> Content {
    match (message, tag) {
        (Message::Model, 7) => Content::Message(Message::Graph),
        (Message::Model, 8 | 14) => Content::Message(Message::Leaf),
        (Message::Graph, 1) => Content::Message(Message::Node),
        (Message::Graph, 5) => Content::Message(Message::Tensor),
        (Message::Graph, 11..=13) => Content::Message(Message::ValueInfo),
        (Message::Node, 5) => Content::Message(Message::Leaf),
        (Message::Tensor, 1 | 7) | (Message::Leaf, 8) => Content::Integers,
        (Message::Tensor, 13) => Content::Message(Message::Leaf),
        (Message::ValueInfo, 2) => Content::Message(Message::Type),
        (Message::Type, 1) => Content::Message(Message::TensorType),
        (Message::TensorType, 2) => Content::Message(Message::Shape),
        (Message::Shape, 1) => Content::Message(Message::Leaf),
        _ => Content::Opaque,
    }
}

/// Proves that `bytes` is a well-formed model message of at most [`MAX_FIELDS`] fields.
///
/// # Errors
/// A sentence about the first violation.
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    let mut fields = 0;
    walk(bytes, Message::Model, &mut fields)
}

fn walk(mut bytes: &[u8], message: Message, fields: &mut usize) -> Result<(), String> {
    let count = |fields: &mut usize, more: usize| {
        *fields = fields.saturating_add(more);
        if *fields > MAX_FIELDS {
            return Err(format!("more than {MAX_FIELDS} fields"));
        }
        Ok(())
    };
    while !bytes.is_empty() {
        count(fields, 1)?;
        let key = varint(&mut bytes)?;
        match key & 7 {
            0 => {
                varint(&mut bytes)?;
            }
            1 => {
                take(&mut bytes, 8)?;
            }
            2 => {
                let length = varint(&mut bytes)?;
                let payload = take(&mut bytes, length)?;
                match content(message, key >> 3) {
                    Content::Message(inner) => walk(payload, inner, fields)?,
                    Content::Integers => count(fields, payload.len())?,
                    Content::Opaque => {}
                }
            }
            5 => {
                take(&mut bytes, 4)?;
            }
            other => return Err(format!("not an ONNX protobuf: wire type {other}")),
        }
    }
    Ok(())
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], String> {
    let split = usize::try_from(length).ok().and_then(|length| bytes.split_at_checked(length));
    let (head, rest) = split.ok_or("truncated, or not an ONNX protobuf: a field ends too late")?;
    *bytes = rest;
    Ok(head)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) =
            bytes.split_first().ok_or("truncated, or not an ONNX protobuf: a number is cut off")?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("not an ONNX protobuf: a number has more than 10 bytes".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_and_bloated_messages_are_refused() {
        let mut empty_nodes = [0x0a, 0x00].repeat(MAX_FIELDS + 1);
        let mut bloated = vec![0x3a];
        prost::encode_length_delimiter(empty_nodes.len(), &mut bloated).unwrap();
        bloated.append(&mut empty_nodes);
        let cases: [(&str, &[u8], &str); 6] = [
            ("cut number", &[0x08, 0x80], "cut off"),
            ("cut field", &[0x3a, 0x05, 0x0a], "ends too late"),
            (
                "huge length",
                &[0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
                "ends",
            ),
            ("endless number", &[0x80; 11], "more than 10 bytes"),
            ("group", &[0x0b], "wire type 3"),
            ("bloated", &bloated, "more than 1048576 fields"),
        ];
        for (case, bytes, expected) in cases {
            let error = check(bytes).unwrap_err();
            assert!(error.contains(expected), "{case}: {error}");
        }
        assert_eq!(check(&[]), Ok(()));
    }
}
