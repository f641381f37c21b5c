//! Tests of types written as in C.

use expect_test::{Expect, expect};
use hvprobe_fixtures::btf::{Btf, sample};

use super::{SIGNED, one, parsed};
use crate::types::TypeId;

#[test]
fn types_print_as_c() {
    let types = parsed(&sample());
    let check = |name: &str, expected: Expect| {
        expected.assert_eq(&types.declaration(one(&types, name)));
    };
    check(
        "struct open_how",
        expect![[r#"
            struct open_how {
            	__u64 flags;
            	__u64 mode;
            	__u64 resolve;
            };"#]],
    );
    check(
        "struct file",
        expect![[r#"
            struct file {
            	int fd;
            	unsigned int busy:3;
            	_Bool on:1;
            	union {
            		__u64 whole;
            		struct {
            			unsigned int low;
            			unsigned int high;
            		};
            	};
            	int (*open)(struct inode *, const char *);
            	void (*show[2])(void);
            	char comm[16];
            	struct {
            		int deep;
            	} named;
            	enum color color;
            	char matrix[3][16];
            	char (*of_comm)[16];
            	__u64 rest[];
            };"#]],
    );
    check(
        "enum color",
        expect![[r#"
        enum color {
        	RED = 0,
        	LAST = -1,
        };"#]],
    );
    check(
        "pair_t",
        expect![[r#"
        typedef struct {
        	unsigned int low;
        	unsigned int high;
        } pair_t;"#]],
    );
    check("__u64", expect!["typedef unsigned long __u64;"]);
    check("unsigned long", expect!["unsigned long;"]);
    check("struct inode", expect!["struct inode;"]);
    let function = types.named("do_sys_openat2").next().unwrap();
    assert_eq!(
        types.declaration(function),
        "int do_sys_openat2(int dfd, const char *filename, struct open_how *how);"
    );
}

#[test]
fn names_of_types_are_as_in_c() {
    let mut btf = Btf::default();
    let int = btf.int("int", 4, SIGNED);
    let constant = btf.refer(10, "", int);
    let pointer = btf.pointer(constant);
    let fixed = btf.refer(10, "", pointer);
    let of_fixed = btf.pointer(fixed);
    let volatile = btf.refer(9, "", constant);
    let restrict = btf.refer(11, "", pointer);
    let array = btf.array(pointer, 4);
    let of_array = btf.pointer(array);
    let constant_array = btf.refer(10, "", array);
    let of_constant_array = btf.pointer(constant_array);
    let function = btf.prototype(pointer, &[("", int), ("", 0)]);
    let of_function = btf.pointer(function);
    let returning = btf.prototype(of_function, &[("it", of_array)]);
    let of_returning = btf.pointer(returning);
    let table = btf.array(of_returning, 2);
    let tag = btf.refer(18, "user", int);
    let tagged = btf.pointer(tag);
    let none = btf.structure("", 0, &[]);
    let variable = btf.add(&[0, 14 << 24, int, 0]);
    let types = parsed(&btf);
    for (id, expected) in [
        (0, "void"),
        (pointer, "const int *"),
        (fixed, "const int *const"),
        (of_fixed, "const int *const *"),
        (volatile, "const volatile int"),
        (restrict, "const int *restrict"),
        (array, "const int *[4]"),
        (of_array, "const int *(*)[4]"),
        (of_constant_array, "const int *const (*)[4]"),
        (function, "const int *(int, ...)"),
        (of_function, "const int *(*)(int, ...)"),
        (
            of_returning,
            "const int *(*(*)(const int *(*it)[4]))(int, ...)",
        ),
        (table, "const int *(*(*[2])(const int *(*it)[4]))(int, ...)"),
        (tagged, "int *"),
        (none, "struct {...}"),
        (variable, "..."),
        (u32::MAX, "..."),
    ] {
        assert_eq!(types.name(TypeId(id)), expected);
    }
    let variable = types.variable(TypeId(of_function), "call");
    assert_eq!(variable, "const int *(*call)(int, ...)");
}
